"""Where slipstream meets torch: tensors, autograd hooks, optimizers, checkpoints."""
