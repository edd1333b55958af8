"""What is decided before training starts: chunks, holders, costs. Pure."""
