"""What is measured and on what: workloads, layer tables, emulated devices, stragglers.

Import from the modules; importing this package alone costs nothing, not even torch.
"""
