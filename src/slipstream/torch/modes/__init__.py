"""Ways of training: who updates the weights, when, and from which gradients."""
