"""Hypothesis without a deadline: the first tensor operation of a busy machine may take a second."""

from hypothesis import settings

settings.register_profile("objective", deadline=None)
settings.load_profile("objective")
