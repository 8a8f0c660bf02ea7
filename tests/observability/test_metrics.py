"""metrics.jsonl and the line of an iteration."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import numpy as np
import pytest

from megatron_vcpo.observability.metrics import METRICS_FILE, MetricsFileError, MetricsLog, iteration_line, read_metrics

FULL = {
    "iteration": 12,
    "train_iters": 200,
    "reward": 0.4312,
    "rho": 0.8,
    "lr_multiplier": 0.894,
    "lr": 1.8e-5,
    "lag_mean": 1.5,
    "lag_max": 3,
    "response_length": 121.4,
    "truncated": 0.031,
    "mismatch_kl": 2.1e-4,
    "grad_norm": 0.52,
    "skipped": 0,
    "count/rejected_rewards": 0,
    "count/refused_stale": 0,
    "time/generate": 3.21,
    "time/reward": 0.1,
    "time/sync": 0.04,
    "time/train": 2.4,
}


def write_iterations(run_dir: Path, iterations: range, *, resume_iteration: int = 0) -> None:
    with MetricsLog(run_dir, resume_iteration=resume_iteration) as log:
        for iteration in iterations:
            log.append({"iteration": iteration, "reward": iteration + resume_iteration / 1000})


def test_written_metrics_are_read_back_exactly(tmp_path: Path) -> None:
    with MetricsLog(tmp_path / "new" / "run") as log:
        log.append(FULL)
        log.append({**FULL, "iteration": 13, "eval/reward": 1 / 3})
    assert read_metrics(tmp_path / "new" / "run") == [FULL, {**FULL, "iteration": 13, "eval/reward": 1 / 3}]


def test_each_iteration_is_on_disk_before_the_next_begins(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path)
    for iteration in (1, 2, 3):
        log.append({"iteration": iteration})
        assert len(read_metrics(tmp_path)) == iteration
    log.close()


def test_non_finite_values_are_null_in_valid_json_and_named(tmp_path: Path) -> None:
    with MetricsLog(tmp_path) as log:
        log.append({"iteration": 1, "rho": math.nan, "grad_norm": math.inf, "loss": -math.inf, "reward": 0.5})
    record = json.loads((tmp_path / METRICS_FILE).read_text(), parse_constant=lambda name: pytest.fail(name))
    assert record["nonfinite"] == ["rho", "grad_norm", "loss"]
    assert record["rho"] is record["grad_norm"] is record["loss"] is None
    (read,) = read_metrics(tmp_path)
    assert read["reward"] == 0.5
    assert math.isnan(read["rho"])
    assert math.isnan(read["grad_norm"])
    assert "nonfinite" not in read


def test_numpy_numbers_and_booleans_are_written_as_plain_numbers(tmp_path: Path) -> None:
    with MetricsLog(tmp_path) as log:
        log.append({"iteration": 1, "rho": np.float32(0.5), "skipped": True})
    assert json.loads((tmp_path / METRICS_FILE).read_text()) == {"iteration": 1, "rho": 0.5, "skipped": 1.0}


def test_metrics_without_iteration_are_refused(tmp_path: Path) -> None:
    with MetricsLog(tmp_path) as log, pytest.raises(ValueError, match="'iteration'"):
        log.append({"reward": 1.0})


def test_resume_moves_away_what_the_lost_run_wrote_past_the_checkpoint(tmp_path: Path) -> None:
    write_iterations(tmp_path, range(1, 8))
    with (tmp_path / METRICS_FILE).open("a") as file:
        file.write('{"iteration": 8, "rew')
    lost = (tmp_path / METRICS_FILE).read_text().splitlines(keepends=True)[4:]
    write_iterations(tmp_path, range(5, 11), resume_iteration=4)
    records = read_metrics(tmp_path)
    assert [record["iteration"] for record in records] == list(range(1, 11))
    assert records[3]["reward"] == 4.0
    assert records[4]["reward"] == 5.004
    assert (tmp_path / "metrics.cut.1.jsonl").read_text() == "".join(lost)
    write_iterations(tmp_path, range(4, 5), resume_iteration=3)
    cut = [json.loads(line) for line in (tmp_path / "metrics.cut.2.jsonl").read_text().splitlines()]
    assert [record["iteration"] for record in cut] == list(range(4, 11))
    write_iterations(tmp_path, range(5, 6), resume_iteration=4)
    assert len(list(tmp_path.iterdir())) == 3  # where nothing is cut, nothing is kept


def test_resume_after_a_kill_in_the_middle_of_a_line_starts_on_a_new_line(tmp_path: Path) -> None:
    write_iterations(tmp_path, range(1, 4))
    with (tmp_path / METRICS_FILE).open("a") as file:
        file.write('{"iteration": 4, "rew')
    write_iterations(tmp_path, range(4, 6), resume_iteration=3)
    assert [record["iteration"] for record in read_metrics(tmp_path)] == [1, 2, 3, 4, 5]


def test_complete_last_line_without_newline_survives_a_resume(tmp_path: Path) -> None:
    (tmp_path / METRICS_FILE).write_text('{"iteration": 1}\n{"iteration": 2}')
    write_iterations(tmp_path, range(3, 4), resume_iteration=2)
    assert [record["iteration"] for record in read_metrics(tmp_path)] == [1, 2, 3]


def test_cut_that_dies_before_its_end_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_iterations(tmp_path, range(1, 8))

    def full_disk(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(OSError, match="No space left"):
        MetricsLog(tmp_path, resume_iteration=4)
    assert len(read_metrics(tmp_path)) == 7


def test_new_run_in_a_used_folder_keeps_the_old_curves_aside(tmp_path: Path) -> None:
    for length in (2, 3, 4):
        write_iterations(tmp_path, range(1, length + 1))
    assert len(read_metrics(tmp_path)) == 4
    assert len((tmp_path / "metrics.1.jsonl").read_text().splitlines()) == 2
    assert len((tmp_path / "metrics.2.jsonl").read_text().splitlines()) == 3


@pytest.mark.parametrize("torn", [b'{"iteration": 3, "re', b'{"iteration": 3, "x": "\xc3', b"{"])
def test_torn_last_line_is_left_out(tmp_path: Path, torn: bytes) -> None:
    (tmp_path / METRICS_FILE).write_bytes(b'{"iteration": 1}\n{"iteration": 2}\n' + torn)
    assert [record["iteration"] for record in read_metrics(tmp_path)] == [1, 2]


MALFORMED = {
    "torn": '{"iteration": 2, "re',
    "list": "[1]",
    "no iteration": '{"reward": 1}',
    "text": '{"iteration": 2, "rho": "x"}',
    "empty": "",
    "400 digits": '{"iteration": 2, "rho": ' + "9" * 400 + "}",
    "5000 digits": '{"iteration": 2, "rho": ' + "9" * 5000 + "}",
    "iteration of 400 digits": '{"iteration": ' + "9" * 400 + "}",
    "nested": '{"iteration": 2, "rho": ' + "[" * 100_000 + "]" * 100_000 + "}",
}


@pytest.mark.parametrize("bad", MALFORMED.values(), ids=MALFORMED)
def test_malformed_line_elsewhere_is_an_error_with_its_number(tmp_path: Path, bad: str) -> None:
    for lines in (['{"iteration": 1}', bad, '{"iteration": 3}'], ['{"iteration": 1}', bad]):
        (tmp_path / METRICS_FILE).write_text("\n".join(lines) + "\n")
        with pytest.raises(MetricsFileError, match=r"metrics\.jsonl line 2 is not a metrics record"):
            read_metrics(tmp_path)


def test_folder_without_metrics_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(MetricsFileError, match=f"{tmp_path} holds no metrics.jsonl"):
        read_metrics(tmp_path)


def test_full_disk_names_the_iteration_and_the_file() -> None:
    log = MetricsLog.__new__(MetricsLog)
    log.path = Path("/dev/full")
    log._file = log.path.open("a", buffering=1)
    with pytest.raises(OSError, match=r"metrics of iteration 7 could not be written: No space left.*'/dev/full'"):
        log.append({"iteration": 7})
    assert log._file.closed  # or Python would try again at its end


def test_line_shows_every_quantity_once() -> None:
    assert iteration_line(FULL) == (
        "  12/200 | reward  0.431 | rho 0.800 | lr 1.8e-05 (x0.89) | lag  1.5/ 3 | length  121.4 ( 3% cut) | "
        "kl 2.1e-04 | grad  0.520 | generate  3.2 reward  0.1 sync  0.0 train  2.4 s"
    )


def test_a_run_without_rewards_shows_its_loss() -> None:
    line = iteration_line({"iteration": 3, "train_iters": 70, "loss": 1.25})
    assert line.startswith("   3/70 | loss    1.250 | ")


def test_columns_stay_in_place_over_iterations_and_with_missing_values() -> None:
    usual = iteration_line(FULL)
    early = iteration_line({**FULL, "iteration": 1, "reward": -1.25, "lag_mean": 0.0, "lag_max": 0, "rho": math.nan})
    bare = iteration_line({"iteration": 200, "train_iters": 200})
    bars = [position for position, letter in enumerate(usual) if letter == "|"]
    for line in (early, bare):
        assert [position for position, letter in enumerate(line) if letter == "|"] == bars


def test_counters_skips_and_evaluation_show_only_when_there_is_something_to_say() -> None:
    quiet = iteration_line(FULL)
    assert "skipped" not in quiet.lower()
    assert "held-out" not in quiet
    assert "stale" not in quiet
    loud = iteration_line({**FULL, "skipped": 1, "count/refused_stale": 3, "eval/reward": 0.5})
    assert loud == quiet + " | held-out reward 0.500 | STEP SKIPPED | refused stale: 3"
    assert "\n" not in loud
