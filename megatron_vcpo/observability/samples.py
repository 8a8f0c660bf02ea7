"""samples.jsonl: some trajectories of each rollout phase as text, for reading."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from megatron_vcpo.rollout.trajectory import Trajectory

SAMPLES_FILE = "samples.jsonl"


class SamplesLog:
    """Appends trajectories to `run_dir/samples.jsonl`. To be made by one rank only.

    Args:
        run_dir: folder of the run.
        next_group: number of the next prompt to be drawn. What the file holds from it on was written by a run that was
            lost after its last checkpoint, or by another run in the same folder, and is cut off.
        decode: token ids to text.
    """

    def __init__(self, run_dir: Path, *, next_group: int, decode: Callable[[list[int]], str]) -> None:
        self.path = run_dir / SAMPLES_FILE
        self._decode = decode
        if self.path.exists():
            lines = self.path.read_text(encoding="utf-8").split("\n")
            kept = [line for line in lines if line and _group(line) < next_group]
            replacement = self.path.with_suffix(".tmp")
            replacement.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")
            replacement.replace(self.path)

    def append(self, trajectories: Sequence[Trajectory], *, version: int) -> None:
        """Write trajectories that the policy of `version` sampled."""
        with self.path.open("a", encoding="utf-8") as file:
            for trajectory in trajectories:
                record: dict[str, Any] = {
                    "version": version,
                    "group": trajectory.group_id,
                    "prompt": self._decode(trajectory.prompt_ids.tolist()),
                    "response": self._decode(trajectory.response_ids.tolist()),
                    "reward": trajectory.reward,
                    "parts": dict(trajectory.reward_parts),
                    "truncated": trajectory.truncated,
                }
                file.write(json.dumps(record, ensure_ascii=False) + "\n")


def _group(line: str) -> float:
    try:
        return int(json.loads(line)["group"])
    except (ValueError, KeyError, TypeError):
        return float("inf")  # a torn line
