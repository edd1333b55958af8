"""Studies of training methods: their effect on a model, without a network."""
