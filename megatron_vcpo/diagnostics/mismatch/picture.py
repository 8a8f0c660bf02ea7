"""The mismatch report as a picture: what each switch changes, and the error of each dtype."""

from __future__ import annotations

import textwrap
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from megatron_vcpo.diagnostics.mismatch.report import Component, Report, Size, absence

_BLUE, _ORANGE, _GREY = "#0072B2", "#E69F00", "#8A8A8A"  # Okabe and Ito
_DECADES_SHOWN = 1e-4  # fraction of the largest bar; smaller bars are drawn at the axis


def draw(result: Report, sentence: str, out: Path) -> None:
    """Write a PNG file, creating its folder."""
    figure = Figure(figsize=(11.0, 4.4), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    _components(left, result)
    _types(right, result)
    figure.suptitle("\n".join(textwrap.wrap(sentence, 110)), fontsize=10)
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, format="png", dpi=130)


def _components(axes: Axes, result: Report) -> None:
    rows: list[tuple[str, Size | None, str, str]] = [
        (c.name, c.size, _GREY if c.share is None else _BLUE, _label(c)) for c in result.components
    ]
    rows.append(("all together", result.total, _ORANGE, f"{result.total.mean:.1e}"))
    floor = _floor([size.mean for _, size, _, _ in rows if size is not None])
    for place, (_, size, color, label) in enumerate(rows):
        width = floor if size is None else max(size.mean, floor)
        axes.barh(place, width, color=color)
        axes.annotate(label, (width, place), xytext=(4, 0), textcoords="offset points", va="center", fontsize=8)
    axes.set_yticks(range(len(rows)), [name for name, *_ in rows])
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set_xlim(left=floor, right=30 * max(size.mean for _, size, _, _ in rows if size is not None) + 2 * floor)
    axes.set_xlabel("mean |difference| of log-probs, nats a token")
    axes.set_title("what each switch changes (share of the squared difference)", fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)


def _label(component: Component) -> str:
    if component.size is None:
        return absence(component)
    if component.share is None:
        return f"{component.size.mean:.1e}, removed"
    return f"{component.size.mean:.1e} ({round(100 * component.share)}%)"


def _types(axes: Axes, result: Report) -> None:
    bars = [(f"{row.dtype}\nagainst fp32", row.rounding.mean, _BLUE) for row in result.types if row.rounding.mean > 0.0]
    bars += [(f"{row.dtype}\nboth sides", row.between.mean, _ORANGE) for row in result.types if row.between is not None]
    if not bars:
        axes.set_axis_off()
        return
    floor = _floor([mean for _, mean, _ in bars])
    for place, (_, mean, color) in enumerate(bars):
        axes.bar(place, max(mean, floor), color=color)
        axes.annotate(
            f"{mean:.1e}", (place, max(mean, floor)), xytext=(0, 2), textcoords="offset points", ha="center", fontsize=8
        )
    axes.set_xticks(range(len(bars)), [name for name, *_ in bars], fontsize=7)
    axes.set_yscale("log")
    axes.set_ylim(bottom=floor)
    axes.set_title("data types: trainer's rounding; trainer against engine", fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)


def _floor(means: list[float]) -> float:
    largest = max(means, default=0.0)
    smallest = min((mean for mean in means if mean > largest * _DECADES_SHOWN), default=largest)
    return smallest / 3 if smallest > 0.0 else 1e-9
