"""What all tests share: property tests on a busy machine, which tests are fast, which files come first, fixtures."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from megatron_vcpo.runtime import logs

# Property tests on a busy machine are slow, and no less right: its first tensor operation may take a second, and
# drawing a minibatch several.
settings.register_profile("any_machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any_machine")

# A shell's background job ignores Ctrl-C, and so would all that tests start, whose handling of it is tested.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

_SECONDS = {"distributed": 20.0, "engine": 15.0, "slow": 5.0, "gpu": 1.0}  # of a test with that mark, roughly


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark as fast what has no other mark; on several workers, begin with the files that take longest."""
    marks = [{mark.name for mark in item.iter_markers()} & _SECONDS.keys() for item in items]
    for item, found in zip(items, marks, strict=True):
        if not found:
            item.add_marker("fast")
    if hasattr(config, "workerinput"):  # of pytest-xdist
        seconds: Counter[Path] = Counter()
        for item, found in zip(items, marks, strict=True):
            seconds[item.path] += 0.05 + sum(_SECONDS[name] for name in found)
        items.sort(key=lambda item: -seconds[item.path])


@pytest.fixture(autouse=True)
def _logging_as_in_training() -> None:
    """Every test anew: one may have run a command, which names itself instead."""
    logs.configure(rank=0)


@pytest.fixture(autouse=True)
def _no_python_in_a_fast_test(request: pytest.FixtureRequest) -> Iterator[None]:
    """A fast test that starts a Python fails; libraries may look for a compiler."""
    if request.node.get_closest_marker("fast") is None:
        yield
        return
    stock = subprocess.Popen.__init__

    def refuse(self: Any, args: Any, *rest: Any, **options: Any) -> None:
        program = str(args if isinstance(args, (str, Path)) else args[0])
        assert Path(program).name != Path(sys.executable).name, f"{args} in a fast test: mark it as slow"
        stock(self, args, *rest, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess.Popen, "__init__", refuse)
        yield


@pytest.fixture(scope="module")
def megatron_groups() -> Iterator[Any]:
    """ProcessGroupCollection of a single-process job; of one file, since others make and end jobs of their own."""
    from tests.oracle.single_process import single_process_megatron

    with single_process_megatron() as groups:
        yield groups
