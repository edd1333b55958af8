"""``job.distribute``, ``job.save`` and ``job.load``: what a training is made of."""
