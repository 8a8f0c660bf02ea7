"""What all tests share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

# Property tests on a busy machine are slow, and no less right: its first tensor operation may take a second, and
# drawing a minibatch several.
settings.register_profile("any_machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any_machine")


@pytest.fixture(scope="session")
def megatron_groups() -> Iterator[Any]:
    """ProcessGroupCollection of a single-process job."""
    from tests.oracle.single_process import single_process_megatron

    with single_process_megatron() as groups:
        yield groups
