"""Gradients taken from autograd, and what a training loop does with weights and steps."""
