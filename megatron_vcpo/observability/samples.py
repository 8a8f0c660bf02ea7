"""samples.jsonl: some trajectories of each rollout phase as text, for reading."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from megatron_vcpo.data.trajectory import Trajectory
from megatron_vcpo.runtime.files import cut_file, unused_name

SAMPLES_FILE = "samples.jsonl"


class SamplesLog:
    """Appends trajectories to `run_dir/samples.jsonl`. Create it on one rank only.

    Args:
        run_dir: folder of the run.
        next_group: number of the next prompt to draw. Records from this number on, from a run that got further, are
            moved to samples.cut.1.jsonl (or the next free number). 0 means a new run: an existing file is kept under
            another name (samples.1.jsonl, ...), like the metrics file.
        decode_prompt, decode_response: token ids to text; a response as the environment judges it.
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        next_group: int,
        decode_prompt: Callable[[list[int]], str],
        decode_response: Callable[[list[int]], str],
    ) -> None:
        self.path = run_dir / SAMPLES_FILE
        self._decode_prompt = decode_prompt
        self._decode_response = decode_response
        if self.path.exists():
            if next_group > 0:
                _keep_until(self.path, next_group)
            else:
                self.path.rename(unused_name(self.path))

    def append(self, trajectories: Sequence[Trajectory], *, version: int) -> None:
        """Write trajectories that the policy of `version` sampled.

        Raises:
            OSError: for example, the disk is full; names the file.
        """
        lines = [json.dumps(self._record(trajectory, version), ensure_ascii=False) for trajectory in trajectories]
        try:
            # Names of parts are arbitrary. Half a surrogate pair is written as \ud800, which JSON reads back unchanged.
            with self.path.open("a", encoding="utf-8", errors="backslashreplace") as file:
                file.write("".join(f"{line}\n" for line in lines))
        except OSError as error:
            sentence = f"the trajectories of version {version} could not be written: {error.strerror}"
            raise OSError(error.errno, sentence, str(self.path)) from error

    def _record(self, trajectory: Trajectory, version: int) -> dict[str, Any]:
        return {
            "version": version,
            "group": trajectory.group_id,
            "prompt": self._decode_prompt(trajectory.prompt_ids.tolist()),
            "response": self._decode_response(trajectory.response_ids.tolist()),
            "reward": trajectory.reward,
            "parts": dict(trajectory.reward_parts),
            "truncated": trajectory.truncated,
        }


def _keep_until(path: Path, next_group: int) -> None:
    """Move the groups from `next_group` on, and an incomplete last line, to another file."""
    lines = [line + b"\n" for line in path.read_bytes().split(b"\n") if line]
    kept = [line for line in lines if _group(line) < next_group]
    cut = [line for line in lines if _group(line) >= next_group]
    cut_file(path, kept=b"".join(kept), cut=b"".join(cut))


def _group(line: bytes) -> float:
    try:
        return int(json.loads(line)["group"])
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return float("inf")  # an incomplete line
