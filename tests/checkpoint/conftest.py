"""One Megatron process for the tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.oracle.single_process import single_process_megatron


@pytest.fixture(scope="session")
def megatron_groups() -> Iterator[Any]:
    """ProcessGroupCollection of a single-process job."""
    with single_process_megatron() as groups:
        yield groups
