"""Optimizers: the user's, the one that a loop sees, and pieces of one at servers."""
