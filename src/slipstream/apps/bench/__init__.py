"""The parts of benchmarks: workloads, layer tables, emulated devices, stragglers.

Import from the modules; importing this package alone costs nothing, not even torch.
"""
