"""The torch side of slipstream: tensors, autograd hooks, optimizers, checkpoints."""
