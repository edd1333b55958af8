"""Tensors of models: which there are, where they lie, and how they are copied and summed."""
