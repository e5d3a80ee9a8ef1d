"""Settings of every test."""

from hypothesis import settings

# One slow example on a busy machine is no fault.
settings.register_profile("busy_machine", deadline=None)
settings.load_profile("busy_machine")
