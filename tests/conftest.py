from __future__ import annotations

import signal

from hypothesis import HealthCheck, settings

# No test may depend on how fast the machine is.
settings.register_profile(
    "steady", deadline=None, suppress_health_check=[HealthCheck.too_slow], max_examples=60
)
settings.load_profile("steady")

# Under nohup, or in a shell's background, these are ignored, and everything started here would
# inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
