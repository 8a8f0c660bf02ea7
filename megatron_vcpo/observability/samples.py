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
    """Appends trajectories to `run_dir/samples.jsonl`. To be made by one rank only.

    Args:
        run_dir: folder of the run.
        next_group: number of the next prompt to be drawn. What the file holds from it on was written by a run that went
            further, and is moved to samples.cut.1.jsonl (or the next free number). With 0 the run is a new one: a file
            that is there already is kept under another name (samples.1.jsonl, ...), as that of the metrics is.
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
            OSError: the disk is full, say; names the file.
        """
        lines = [json.dumps(self._record(trajectory, version), ensure_ascii=False) for trajectory in trajectories]
        try:
            # Names of parts are anybody's: half a surrogate pair becomes \ud800, which JSON reads as just that.
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
    """Move the groups from `next_group` on, and a torn last line, to another file."""
    lines = [line + b"\n" for line in path.read_bytes().split(b"\n") if line]
    kept = [line for line in lines if _group(line) < next_group]
    cut = [line for line in lines if _group(line) >= next_group]
    cut_file(path, kept=b"".join(kept), cut=b"".join(cut))


def _group(line: bytes) -> float:
    try:
        return int(json.loads(line)["group"])
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return float("inf")  # a torn line
