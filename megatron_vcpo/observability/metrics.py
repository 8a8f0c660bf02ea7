"""The metrics of an iteration: one JSON object in metrics.jsonl, and one line to read.

MetricsLog      appends to metrics.jsonl; moves away what an earlier run wrote beyond the checkpoint
read_metrics    reads the file
iteration_line  the line printed once per iteration

Metrics are flat mappings from slash-separated names to numbers, with `iteration` (1-based) in each. Times are seconds,
lags policy versions, lengths tokens, shares fractions of 1; keys under `count/` are cumulative.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from megatron_vcpo.runtime.files import cut_file, unused_name

METRICS_FILE = "metrics.jsonl"
_LARGEST_INTEGER = 2**53
_PHASES = ("generate", "reward", "sync", "train")


class MetricsFileError(ValueError):
    """A metrics file that cannot be read; the message is one sentence that names the file and the line."""


class MetricsLog:
    """The metrics of one run, appended to `run_dir/metrics.jsonl`. Create it on one rank only.

    Args:
        run_dir: folder of the run; created if missing.
        resume_iteration: iteration of the checkpoint from which the run continues. Lines of later iterations, from a
            run that got further, are moved to metrics.cut.1.jsonl (or the next free number), so that no step is in the
            curve twice. 0 means a new run: an existing file is kept under another name (metrics.1.jsonl, ...).
    """

    def __init__(self, run_dir: Path, *, resume_iteration: int = 0) -> None:
        run_dir.mkdir(parents=True, exist_ok=True)
        self.path = run_dir / METRICS_FILE
        if self.path.exists():
            if resume_iteration > 0:
                _keep_until(self.path, resume_iteration)
            else:
                self.path.rename(unused_name(self.path))
        self._file = self.path.open("a", encoding="utf-8", buffering=1)

    def append(self, metrics: Mapping[str, float]) -> None:
        """Write one iteration. NaN and infinities become null and their keys are listed under `nonfinite`.

        Raises:
            ValueError: `iteration` is missing.
            OSError: for example, the disk is full; names the file.
        """
        if "iteration" not in metrics:
            raise ValueError("Metrics need the key 'iteration'.")
        numbers = {key: _plain_number(value) for key, value in metrics.items()}
        nonfinite = [key for key, value in numbers.items() if not math.isfinite(value)]
        record: dict[str, float | list[str] | None] = {
            key: value if math.isfinite(value) else None for key, value in numbers.items()
        }
        if nonfinite:
            record["nonfinite"] = nonfinite
        try:
            self._file.write(json.dumps(record, allow_nan=False) + "\n")
        except OSError as error:
            with contextlib.suppress(OSError):
                self._file.close()  # otherwise Python tries to write the rest again at exit, and prints a traceback
            sentence = f"the metrics of iteration {numbers['iteration']} could not be written: {error.strerror}"
            raise OSError(error.errno, sentence, str(self.path)) from error

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read_metrics(run_dir: Path) -> list[dict[str, float]]:
    """The metrics of a run in the order of the file, with NaN where a value was not finite.

    An incomplete last line, which a killed run leaves behind, is left out.

    Raises:
        MetricsFileError: no such file, or a line that is not a metrics record.
    """
    path = run_dir / METRICS_FILE
    if not path.is_file():
        raise MetricsFileError(f"{run_dir} holds no {METRICS_FILE}; name the folder of a run.")
    return [record for record, _ in _records(path)]


def iteration_line(metrics: Mapping[str, float]) -> str:
    """One readable line in fixed columns; '-' for what was not measured, and counters only if not zero."""

    def cell(key: str, layout: str) -> str:
        width = int(layout.split(".")[0])
        return f"{metrics[key]:{layout}}" if key in metrics else f"{'-':>{width}}"

    total = f"{metrics['train_iters']:.0f}" if "train_iters" in metrics else "-"
    times = [f"{phase} {cell(f'time/{phase}', '4.1f')}" for phase in _PHASES]
    # A supervised warm-up has no rewards.
    aim = "reward" if "reward" in metrics or "loss" not in metrics else "loss"
    columns = [
        f"{cell('iteration', f'{max(len(total), 4)}.0f')}/{total}",
        f"{aim:<6} {cell(aim, '6.3f')}",
        f"rho {cell('rho', '5.3f')}",
        f"lr {cell('lr', '7.1e')} (x{cell('lr_multiplier', '4.2f')})",
        f"lag {cell('lag_mean', '4.1f')}/{cell('lag_max', '2.0f')}",
        f"length {cell('response_length', '6.1f')} ({cell('truncated', '3.0%')} cut)",
        f"kl {cell('mismatch_kl', '7.1e')}",
        f"grad {cell('grad_norm', '6.3f')}",
        f"{' '.join(times)} s",
    ]
    if "eval/reward" in metrics:
        columns.append(f"held-out reward {metrics['eval/reward']:.3f}")
    if metrics.get("skipped"):
        columns.append("STEP SKIPPED")
    counters = {key.removeprefix("count/"): value for key, value in metrics.items() if key.startswith("count/")}
    columns += [f"{name.replace('_', ' ')}: {value:.0f}" for name, value in counters.items() if value]
    return " | ".join(columns)


def _plain_number(value: float) -> int | float:
    return value if isinstance(value, int) and not isinstance(value, bool) else float(value)


def _records(path: Path) -> list[tuple[dict[str, float], bytes]]:
    """Each record with the line that it was read from."""
    lines = path.read_bytes().splitlines(keepends=True)
    found: list[tuple[dict[str, float], bytes]] = []
    for number, line in enumerate(lines, start=1):
        record = _parse(line)
        if record is not None:
            found.append((record, line))
        elif number < len(lines) or line.endswith(b"\n"):
            raise MetricsFileError(f"{path} line {number} is not a metrics record: {line[:60]!r}; repair or remove it.")
    return found


def _parse(line: bytes) -> dict[str, float] | None:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict) or not isinstance(record.get("iteration"), int):
        return None
    record.pop("nonfinite", None)
    if not all(value is None or _is_number(value) for value in record.values()):
        return None
    return {key: math.nan if value is None else value for key, value in record.items()}


def _is_number(value: Any) -> bool:
    """Whether a value is a float, or an integer that a float can hold exactly."""
    return isinstance(value, float) or (isinstance(value, int) and abs(value) <= _LARGEST_INTEGER)


def _keep_until(path: Path, iteration: int) -> None:
    """Move the lines after `iteration`, and an incomplete last line, to another file."""
    records, content = _records(path), path.read_bytes()
    torn = content[sum(len(line) for _, line in records) :]
    kept = [line.rstrip(b"\n") + b"\n" for record, line in records if record["iteration"] <= iteration]
    cut = [line for record, line in records if record["iteration"] > iteration]
    cut_file(path, kept=b"".join(kept), cut=b"".join([*cut, torn]))
