from hypothesis import HealthCheck, settings

# No test may depend on how fast the machine is.
settings.register_profile(
    "steady", deadline=None, suppress_health_check=[HealthCheck.too_slow], max_examples=60
)
settings.load_profile("steady")
