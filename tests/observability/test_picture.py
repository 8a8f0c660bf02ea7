"""The picture of a run: what is drawn where."""

from __future__ import annotations

import math
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from megatron_vcpo.observability.metrics import METRICS_FILE, MetricsFileError, MetricsLog
from megatron_vcpo.observability.picture import build_figure, load_run, plot_run, plot_runs

REPOSITORY = Path(__file__).resolve().parents[2]
KEYS = ("reward", "rho", "lr_multiplier", "lag_mean", "lag_max", "mismatch_kl", "grad_norm")


def write_run(run_dir: Path, length: int, **changes: dict[int, float]) -> Path:
    """A run in which every key has the value 1/iteration, but for `changes[key][iteration]`."""
    with MetricsLog(run_dir) as log:
        for iteration in range(1, length + 1):
            metrics: dict[str, float] = {"iteration": iteration, **dict.fromkeys(KEYS, 1 / iteration)}
            for key, values in changes.items():
                if iteration in values:
                    metrics[key.replace("__", "/")] = values[iteration]
            log.append(metrics)
    return run_dir


def panels(*run_dirs: Path) -> dict[str, Axes]:
    figure = build_figure([load_run(run_dir.name, run_dir, index) for index, run_dir in enumerate(run_dirs)])
    return {axes.get_title(loc="left"): axes for axes in figure.axes}


def labelled(axes: Axes, label: str) -> Line2D:
    (line,) = [line for line in axes.get_lines() if line.get_label() == label]
    return line


def png_size(path: Path) -> tuple[int, int]:
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", data[16:24])
    return width, height


def test_six_panels_have_titles_and_units_and_the_values_of_the_run(tmp_path: Path) -> None:
    drawn = panels(write_run(tmp_path / "run", 10))
    assert list(drawn) == [
        "Reward",
        "Effective sample size (rho)",
        "Learning-rate multiplier",
        "Lag of the rollouts",
        "Mismatch of rollout and trainer",
        "Gradient norm",
    ]
    for axes in drawn.values():
        assert axes.get_ylabel()
        line = axes.get_lines()[0]
        np.testing.assert_allclose(np.asarray(line.get_ydata(), dtype=float), 1 / np.arange(1, 11))
        np.testing.assert_array_equal(line.get_xdata(), np.arange(1, 11))


def test_held_out_points_stand_at_their_iterations_only(tmp_path: Path) -> None:
    line = labelled(panels(write_run(tmp_path, 10, eval__reward={5: 0.5, 10: 0.75}))["Reward"], "held out")
    assert list(zip(line.get_xdata(), line.get_ydata())) == [(5, 0.5), (10, 0.75)]


def test_running_mean_of_a_long_run_follows_a_constant_and_ignores_gaps(tmp_path: Path) -> None:
    rewards = {iteration: math.nan if iteration % 5 == 0 else 2.0 for iteration in range(1, 101)}
    axes = panels(write_run(tmp_path, 100, reward=rewards))["Reward"]
    np.testing.assert_allclose(np.asarray(labelled(axes, "running mean").get_ydata(), dtype=float), 2.0)


def test_constant_reference_crosses_the_panel_and_a_moving_one_moves(tmp_path: Path) -> None:
    constant = panels(write_run(tmp_path / "a", 3, rho_reference=dict.fromkeys((1, 2, 3), 0.7)))
    assert set(labelled(constant["Effective sample size (rho)"], "reference").get_ydata()) == {0.7}
    moving = panels(write_run(tmp_path / "b", 3, rho_reference={1: 1.0, 2: 1.0, 3: 0.6}))
    assert list(labelled(moving["Effective sample size (rho)"], "reference").get_ydata()) == [1.0, 1.0, 0.6]


def test_skipped_steps_are_marked_and_leave_a_gap_in_the_gradient_norm(tmp_path: Path) -> None:
    axes = panels(write_run(tmp_path, 6, skipped={3: 1, 4: 0}, grad_norm={3: math.nan}))["Gradient norm"]
    assert list(labelled(axes, "step skipped").get_xdata()) == [3]
    assert np.isnan(np.asarray(axes.get_lines()[0].get_ydata(), dtype=float)[2])


def test_point_between_two_gaps_of_a_long_run_gets_a_marker(tmp_path: Path) -> None:
    values = {iteration: math.nan if iteration in (49, 51) else 0.5 for iteration in range(1, 101)}
    axes = panels(write_run(tmp_path, 100, rho=values))["Effective sample size (rho)"]
    markers = [line for line in axes.get_lines() if line.get_marker() == "."]
    assert [list(line.get_xdata()) for line in markers] == [[50]]


def test_single_iteration_is_a_visible_point_in_every_panel(tmp_path: Path) -> None:
    for title, axes in panels(write_run(tmp_path, 1)).items():
        assert any(line.get_marker() == "." and len(line.get_xdata()) == 1 for line in axes.get_lines()), title
        low, high = axes.get_xlim()
        assert low < 1 < high
        assert list(axes.get_xticks()) == [1]


def test_missing_keys_are_said_to_be_missing(tmp_path: Path) -> None:
    with MetricsLog(tmp_path) as log:
        log.append({"iteration": 1, "reward": 1.0, "rho": math.nan})
    said = {title: [text.get_text() for text in axes.texts] for title, axes in panels(tmp_path).items()}
    assert said.pop("Reward") == []
    assert all(texts == ["not recorded"] for texts in said.values())


@pytest.mark.parametrize(
    ("values", "scale"),
    [((1e-5, 1e-2), "log"), ((1.0, 2.0), "linear"), ((-1e-3, 1e-5), "linear"), ((0.0, 1.0), "linear")],
)
def test_mismatch_is_on_a_log_axis_only_when_that_is_possible_and_helps(
    tmp_path: Path, values: tuple[float, float], scale: str
) -> None:
    axes = panels(write_run(tmp_path, 2, mismatch_kl=dict(enumerate(values, start=1))))
    assert axes["Mismatch of rollout and trainer"].get_yscale() == scale


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("length", [4, 60])
@pytest.mark.parametrize(("low", "high"), [(-1e308, 1e308), (1.0, 1e308), (1e-300, 1e100), (-1e100, 1e100)])
def test_values_too_large_for_an_axis_are_gaps_and_the_rest_is_drawn(
    tmp_path: Path, low: float, high: float, length: int
) -> None:
    values = {iteration: high if iteration % 2 else low for iteration in range(1, length + 1)}
    plot_run(write_run(tmp_path, length, **dict.fromkeys((*KEYS, "eval__reward", "rho_reference"), values)))


def test_axes_of_shares_reach_from_zero_to_one(tmp_path: Path) -> None:
    drawn = panels(write_run(tmp_path, 3))
    for title in ("Effective sample size (rho)", "Learning-rate multiplier"):
        low, high = drawn[title].get_ylim()
        assert low <= 0.0
        assert 1.0 <= high < 1.2


def test_several_runs_have_a_colour_each_and_share_the_panels(tmp_path: Path) -> None:
    runs = [load_run(name, write_run(tmp_path / name, length), index) for index, (name, length) in enumerate(LENGTHS)]
    figure = build_figure(runs)
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["a", "b", "c"]
    colours = [line.get_color() for line in legend.get_lines()]
    assert len(set(colours)) == 3
    for axes in figure.axes:
        curves = {line.get_color(): len(line.get_xdata()) for line in axes.get_lines() if line.get_linestyle() == "-"}
        assert curves == dict(zip(colours, (3, 5, 1)))


LENGTHS = (("a", 3), ("b", 5), ("c", 1))


def test_last_record_of_a_doubled_iteration_counts(tmp_path: Path) -> None:
    (tmp_path / METRICS_FILE).write_text('{"iteration": 1, "rho": 0.1}\n{"iteration": 1, "rho": 0.9}\n')
    assert list(load_run("x", tmp_path).get("rho")) == [0.9]


def test_picture_is_a_png_of_readable_size_in_the_run_folder(tmp_path: Path) -> None:
    path = plot_run(write_run(tmp_path / "run", 30))
    assert path == tmp_path / "run" / "curves.png"
    width, height = png_size(path)
    assert width > 1200
    assert height > 700
    elsewhere = plot_runs({"one": tmp_path / "run", "two": tmp_path / "run"}, tmp_path / "new" / "both.png")
    assert png_size(elsewhere) == (width, height)


def test_empty_metrics_file_is_an_error_that_says_so(tmp_path: Path) -> None:
    (tmp_path / METRICS_FILE).touch()
    with pytest.raises(MetricsFileError, match="is empty"):
        plot_run(tmp_path)


def call_tool(*arguments: Path | str) -> subprocess.CompletedProcess[str]:
    """As a person calls it: by its path, from any folder."""
    command = [sys.executable, str(REPOSITORY / "tools/plot_run.py"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, cwd="/", check=False)


@pytest.mark.slow
def test_tool_draws_and_prints_the_path(tmp_path: Path) -> None:
    first, second = write_run(tmp_path / "a" / "run", 3), write_run(tmp_path / "b" / "run", 4)
    done = call_tool(first)
    assert (done.returncode, done.stdout) == (0, f"{first / 'curves.png'}\n"), done.stderr
    done = call_tool(first, second, "-o", tmp_path / "both.png")
    assert (done.returncode, done.stdout) == (0, f"{tmp_path / 'both.png'}\n"), done.stderr
    png_size(tmp_path / "both.png")


@pytest.mark.slow
def test_tool_says_in_one_sentence_what_is_wrong(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    no_iteration = tmp_path / "started"
    no_iteration.mkdir()
    (no_iteration / METRICS_FILE).touch()
    for folder, sentence in (
        (tmp_path / "nowhere", "nowhere is not a folder"),
        (empty, "holds no metrics.jsonl"),
        (no_iteration, "is empty; there is no iteration to draw yet"),
    ):
        done = call_tool(folder)
        assert done.returncode == 1
        assert done.stdout == ""
        assert len(done.stderr.splitlines()) == 1
        assert sentence in done.stderr
