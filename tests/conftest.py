"""Property tests on a busy machine: they are slow there, and no less right."""

from hypothesis import HealthCheck, settings

# The first tensor operation of a busy machine may take a second, and drawing a minibatch several.
settings.register_profile("any_machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any_machine")
