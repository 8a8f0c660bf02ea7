"""A run as one picture: reward, rho, learning-rate multiplier, lag, mismatch and gradient norm over iterations.

plot_run      one run, with its training curve, held-out points, reference of rho and skipped steps
plot_runs     several runs in the same panels, one colour each
build_figure  the figure behind both
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, PercentFormatter

from megatron_vcpo.observability.metrics import METRICS_FILE, MetricsFileError, read_metrics

PICTURE_FILE = "curves.png"
# Okabe and Ito's palette, which stays distinct for colour-blind readers.
_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_GREY = "#8A8A8A"
_MARKERS_UP_TO = 40  # curves with more points are drawn without markers
_SMOOTH_FROM = 24  # curves with fewer points are drawn without smoothing
_LARGEST = 1e100  # far larger values overflow in the axes' arithmetic; drawn as gaps, like infinity
_LOG_SPAN = 30.0  # largest over smallest value above which the axis is logarithmic


@dataclass
class Run:
    """One run to draw: `series[key]` is aligned with `iterations`, NaN where a value is missing or cannot be drawn."""

    label: str
    color: str
    iterations: np.ndarray  # [I]
    series: dict[str, np.ndarray]  # each [I], float64

    def get(self, key: str) -> np.ndarray:
        return self.series.get(key, np.full(len(self.iterations), math.nan))


def plot_run(run_dir: Path, out: Path | None = None) -> Path:
    """Draw `run_dir/metrics.jsonl` to `out` (default: `run_dir/curves.png`) and return the path of the picture.

    Raises:
        MetricsFileError: no metrics file, an empty or a malformed one.
    """
    return plot_runs({run_dir.resolve().name: run_dir}, out or run_dir / PICTURE_FILE)


def plot_runs(run_dirs: Mapping[str, Path], out: Path) -> Path:
    """Draw several runs (label -> folder) in the same panels into the PNG file `out`, and return `out`."""
    figure = build_figure([load_run(label, run_dir, index) for index, (label, run_dir) in enumerate(run_dirs.items())])
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, format="png", dpi=130)
    return out


def load_run(label: str, run_dir: Path, index: int = 0) -> Run:
    """Read one run; `index` chooses its colour. If an iteration occurs twice, its last record counts."""
    records = {int(record["iteration"]): record for record in read_metrics(run_dir)}
    if not records:
        raise MetricsFileError(f"{run_dir / METRICS_FILE} is empty; there is no iteration to draw yet.")
    iterations = sorted(records)
    keys = dict.fromkeys(key for iteration in iterations for key in records[iteration])
    series = {
        key: np.array([records[iteration].get(key, math.nan) for iteration in iterations], dtype=np.float64)
        for key in keys
    }
    for values in series.values():
        values[~(np.abs(values) <= _LARGEST)] = math.nan
    return Run(label, _COLORS[index % len(_COLORS)], np.array(iterations), series)


def build_figure(runs: Sequence[Run]) -> Figure:
    """Six panels over the iterations; with several runs, a legend of them on top."""
    figure = Figure(figsize=(13.5, 7.2), layout="constrained")
    panels: list[Callable[[Axes, Sequence[Run]], None]] = [
        _draw_reward,
        _draw_rho,
        _draw_multiplier,
        _draw_lag,
        _draw_mismatch,
        _draw_grad_norm,
    ]
    first = min(int(run.iterations[0]) for run in runs)
    last = max(int(run.iterations[-1]) for run in runs)
    margin = max((last - first) * 0.02, 0.5)
    for index, (axes, draw) in enumerate(zip(figure.subplots(2, 3).flat, panels)):
        draw(axes, runs)
        axes.set_xlim(first - margin, last + margin)
        axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True) if last > first else FixedLocator([first]))
        axes.grid(alpha=0.25, linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=9)
        if index >= 3:
            axes.set_xlabel("iteration (optimizer step)", fontsize=9)
    if len(runs) > 1:
        handles = [Line2D([], [], color=run.color, linewidth=2.5, label=run.label) for run in runs]
        figure.legend(handles=handles, loc="outside upper center", ncols=min(len(runs), 5), frameon=False)
    else:
        span = f"iterations {first} to {last}" if last > first else f"iteration {first}"
        figure.suptitle(f"{runs[0].label}, {span}", fontsize=12)
    return figure


def _title(axes: Axes, title: str, unit: str) -> None:
    axes.set_title(title, fontsize=11, loc="left")
    axes.set_ylabel(unit, fontsize=9)


def _curve(axes: Axes, run: Run, key: str, *, color: str, label: str | None = None, light: bool = False) -> bool:
    """Draw one series, with gaps where it is NaN; False if it has no point at all."""
    values = run.get(key)
    if not np.isfinite(values).any():
        return False
    few = len(values) <= _MARKERS_UP_TO
    width = 1.6 if few else 1.1
    axes.plot(run.iterations, values, color=color, label=label, linewidth=width, alpha=0.35 if light else 1.0)
    marked = np.isfinite(values) if few else _isolated(values)
    axes.plot(run.iterations[marked], values[marked], ".", color=color, markersize=6, alpha=0.5 if light else 1.0)
    return True


def _isolated(values: np.ndarray) -> np.ndarray:
    """Points with gaps on both sides, which a line does not show. [I] -> bool [I]"""
    finite = np.concatenate([[False], np.isfinite(values), [False]])
    return finite[1:-1] & ~finite[:-2] & ~finite[2:]


def _smoothed(values: np.ndarray) -> np.ndarray:
    """Centred running mean of the finite values in a window of about a twelfth of the run. [I] -> [I]"""
    half = max(len(values) // 24, 1)
    windows = [values[max(at - half, 0) : at + half + 1] for at in range(len(values))]
    means = [np.mean(window[np.isfinite(window)]) if np.isfinite(window).any() else math.nan for window in windows]
    return np.array(means)


def _nothing_recorded(axes: Axes, drawn: Sequence[bool]) -> None:
    if not any(drawn):
        axes.text(0.5, 0.5, "not recorded", transform=axes.transAxes, ha="center", va="center", color=_GREY)
        axes.set_yticks([])


def _choose_scale(axes: Axes, runs: Sequence[Run], key: str) -> None:
    values = np.concatenate([run.get(key) for run in runs])
    values = values[np.isfinite(values)]
    if len(values) and values.min() > 0 and values.max() / _LOG_SPAN >= values.min():
        axes.set_yscale("log")
    else:
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def _legend(axes: Axes, runs: Sequence[Run]) -> None:
    """A legend on the title's line, where it covers no curve; grey if colours stand for runs."""
    if not axes.get_legend_handles_labels()[0]:
        return
    legend = axes.legend(loc="lower right", bbox_to_anchor=(1.01, 0.99), ncols=3, frameon=False, fontsize=8)
    if len(runs) > 1:
        for line in legend.get_lines():
            line.set(color=_GREY, markerfacecolor=_GREY)


def _draw_reward(axes: Axes, runs: Sequence[Run]) -> None:
    drawn = []
    for number, run in enumerate(runs):
        named = number == 0
        rewards = run.get("reward")
        smooth = np.isfinite(rewards).sum() >= _SMOOTH_FROM
        drawn.append(_curve(axes, run, "reward", color=run.color, label="training" if named else None, light=smooth))
        if smooth:
            label = "running mean" if named else None
            axes.plot(run.iterations, _smoothed(rewards), color=run.color, linewidth=1.9, label=label)
        held_out = run.get("eval/reward")
        measured = np.isfinite(held_out)
        if measured.any():
            color = "black" if len(runs) == 1 else run.color
            (line,) = axes.plot(
                run.iterations[measured], held_out[measured], "--D", color=color, linewidth=1.0, zorder=4
            )
            line.set(markersize=5, markeredgecolor="white", label="held out" if named else "_")
            drawn.append(True)
    _title(axes, "Reward", "mean reward")
    _nothing_recorded(axes, drawn)
    _legend(axes, runs)


def _draw_rho(axes: Axes, runs: Sequence[Run]) -> None:
    drawn = [_curve(axes, run, "rho", color=run.color) for run in runs]
    for number, run in enumerate(runs):
        reference = run.get("rho_reference")
        measured = np.isfinite(reference)
        if measured.any():
            color = _GREY if len(runs) == 1 else run.color
            (line,) = axes.plot(run.iterations, reference, "--", color=color, linewidth=1.2)
            if np.ptp(reference[measured]) == 0:  # across the panel, because a single iteration would give no line
                line.remove()
                line = axes.axhline(reference[measured][0], linestyle="--", color=color, linewidth=1.2)
            line.set_label("reference" if number == 0 else "_")
    _title(axes, "Effective sample size (rho)", "share of the minibatch")
    axes.set_ylim(-0.03, 1.05)
    axes.yaxis.set_major_formatter(PercentFormatter(xmax=1.0, decimals=0))
    _nothing_recorded(axes, drawn)
    _legend(axes, runs)


def _draw_multiplier(axes: Axes, runs: Sequence[Run]) -> None:
    drawn = [_curve(axes, run, "lr_multiplier", color=run.color) for run in runs]
    _title(axes, "Learning-rate multiplier", "times the schedule's rate")
    axes.set_ylim(-0.03, 1.05)
    _nothing_recorded(axes, drawn)


def _draw_lag(axes: Axes, runs: Sequence[Run]) -> None:
    drawn = []
    highest = 1.0
    for run in runs:
        mean, oldest = run.get("lag_mean"), run.get("lag_max")
        drawn.append(_curve(axes, run, "lag_mean", color=run.color, label="mean" if len(runs) == 1 else None))
        if len(runs) == 1 and (oldest > mean).any():
            label = "up to the oldest token"
            axes.fill_between(run.iterations, mean, oldest, color=run.color, alpha=0.2, linewidth=0, label=label)
        highest = max(highest, *np.nan_to_num(mean), *np.nan_to_num(oldest))
    _title(axes, "Lag of the rollouts", "policy versions")
    axes.set_ylim(-0.04 * highest, 1.06 * highest)
    _nothing_recorded(axes, drawn)
    _legend(axes, runs)


def _draw_mismatch(axes: Axes, runs: Sequence[Run]) -> None:
    drawn = [_curve(axes, run, "mismatch_kl", color=run.color) for run in runs]
    _choose_scale(axes, runs, "mismatch_kl")
    _title(axes, "Mismatch of rollout and trainer", "KL, nats per token")
    _nothing_recorded(axes, drawn)


def _draw_grad_norm(axes: Axes, runs: Sequence[Run]) -> None:
    drawn = [_curve(axes, run, "grad_norm", color=run.color) for run in runs]
    _choose_scale(axes, runs, "grad_norm")
    marked: list[bool] = []
    for run in runs:
        skipped = run.iterations[np.nan_to_num(run.get("skipped")) > 0]
        if len(skipped):
            color = "#C00000" if len(runs) == 1 else run.color
            # x in iterations, y as a share of the panel: at the bottom, whatever the scale
            (line,) = axes.plot(
                skipped, np.full(len(skipped), 0.03), "x", color=color, transform=axes.get_xaxis_transform()
            )
            line.set(markersize=6, markeredgewidth=1.6, label="_" if any(marked) else "step skipped")
        marked.append(len(skipped) > 0)
    _title(axes, "Gradient norm", "L2 norm before clipping")
    _nothing_recorded(axes, drawn + marked)
    _legend(axes, runs)
