"""What makes the trainer's log-probs differ from those that the engine recorded: rows, and one piece of advice.

The same tokens are scored several times, and each time one more thing is switched, in this order:

    trainer  ->  weights that sampled  ->  reference routes  ->  fp32  ->  engine, afresh  ->  recorded
            staleness             routing            precision        precision           cache
                                                     of trainer       of engine

Rows are differences between neighbours, so for every token they add up exactly to the whole difference. Pure numpy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch

from megatron_vcpo.objective import kl_estimate

Values = npt.NDArray[np.float64]
Name = Literal[
    "sampling transform", "staleness", "routing", "precision of trainer", "precision of engine", "cache", "rest"
]

NEGLIGIBLE = 1e-4
"""Mean absolute difference, in nats a token, too small to affect importance weights: 0.1 in 1,000 tokens."""


_REST = (
    "The largest part lies on the engine's side and was not split: the rows that were not measured say what they need."
)
_REST_QUANTIZED = (
    "The largest part lies on the engine's side, which computes with quantized weights: drop "
    "--rollout-engine-quantization, or calibrate a later checkpoint."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """Log-probs of the same N sampled tokens, each [N]; None if an input for them was not given or does not exist."""

    recorded: Values  # by the engine, while it sampled
    trained: Values  # trainer's weights, dtype, routers' own choice, the rollouts' temperature
    replayed: Values | None = None  # the same with the trajectories' routes, if training replays them
    untempered: Values | None = None  # as `trained` at temperature 1; None if the rollouts' is 1
    sampler_weights: Values | None = None  # as `trained`, with the weights that sampled; None: the same weights
    routed: Values | None = None  # in addition with the reference's experts; None: model without experts
    exact: Values  # in addition in fp32
    rescored: Values | None = None  # by a new engine with the weights that sampled


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """The size of differences, in nats a token."""

    mean: float  # of absolute values
    p99: float
    largest: float

    @staticmethod
    def of(difference: Values) -> Size:
        """The size of [N] differences."""
        values = np.abs(difference)
        return Size(mean=float(values.mean()), p99=float(np.quantile(values, 0.99)), largest=float(values.max()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Component:
    """One row: what one switch changes."""

    name: Name
    size: Size | None  # None: not measured
    share: float | None = None  # of the squared difference; shares add up to 1, a negative one cancels others
    note: str = ""  # begins with 'needs' if more inputs would allow measuring it


@dataclass(frozen=True, slots=True, kw_only=True)
class TypeRow:
    """The error of one dtype with the same weights and tokens."""

    dtype: str
    rounding: Size  # trainer in this dtype against trainer in fp32
    between: Size | None = None  # trainer against engine, both in this dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The content of a report."""

    tokens: int
    total: Size  # trainer against recorded, with the routers' own choice
    as_trained: Size  # the same as in training: with replay if the run uses it
    kl: float  # k3 estimate of KL(engine, trainer) as trained, nats a token
    components: list[Component]
    types: list[TypeRow]

    def of(self, name: Name) -> Component:
        """The row called `name`."""
        return next(c for c in self.components if c.name == name)


def report(scores: Scores, types: list[TypeRow], notes: Mapping[Name, str]) -> Report:
    """Split the difference between the trainer's log-probs and the recorded ones.

    Args:
        scores: N > 0 tokens.
        types: rows of the table of dtypes.
        notes: for a component that was not measured, what that needs; for others, a remark.
    """
    whole = scores.trained - scores.recorded
    norm = float(whole @ whole)

    def row(name: Name, before: Values, after: Values) -> Component:
        change = before - after
        share = float(change @ whole) / norm if norm else 0.0
        return Component(name=name, size=Size.of(change), share=share, note=notes.get(name, ""))

    def missing(name: Name) -> Component:
        return Component(name=name, size=None, note=notes[name])

    rows = [_transform(scores, notes)]
    before = scores.trained
    steps: tuple[tuple[Name, Values | None], ...] = (
        ("staleness", scores.sampler_weights),
        ("routing", scores.routed),
        ("precision of trainer", scores.exact),
    )
    for name, after in steps:
        rows.append(missing(name) if after is None else row(name, before, after))
        before = before if after is None else after
    if scores.rescored is None:
        rows += [missing("precision of engine"), missing("cache"), row("rest", before, scores.recorded)]
    else:
        rows.append(row("precision of engine", before, scores.rescored))
        rows.append(row("cache", scores.rescored, scores.recorded))
    seen = whole if scores.replayed is None else scores.replayed - scores.recorded
    return Report(
        tokens=len(whole),
        total=Size.of(whole),
        as_trained=Size.of(seen),
        kl=float(kl_estimate(torch.zeros(len(seen)), torch.from_numpy(seen).double(), "k3").mean()),
        components=rows,
        types=types,
    )


def _transform(scores: Scores, notes: Mapping[Name, str]) -> Component:
    """The effect of temperature. It is no part of the difference, since both sides apply it; this is what it would add
    if the trainer did not."""
    name: Name = "sampling transform"
    size = None if scores.untempered is None else Size.of(scores.untempered - scores.trained)
    return Component(name=name, size=size, note=notes[name])


# ---------------------------------------------------------------------- advice


def advice(
    result: Report, *, trainer_dtype: str, engine_dtype: str, replayed: bool = False, quantized: bool = False
) -> str:
    """One sentence that says which setting to change.

    Args:
        result: of `report`.
        trainer_dtype, engine_dtype: the run's: 'float32', 'float16' or 'bfloat16'.
        replayed: training replays the engine's experts.
        quantized: the engine computes with quantized weights.
    """
    if result.as_trained.mean < NEGLIGIBLE:
        return (
            f"Nothing to turn: trainer and record differ by {result.as_trained.mean:.1e} nats a token, "
            f"below {NEGLIGIBLE:g}."
        )
    sizes = {c.name: c.size.mean for c in result.components if c.size is not None and c.share is not None}
    if replayed:
        sizes.pop("routing", None)  # has been switched on already
    precision = max(sizes.pop("precision of trainer", 0.0), sizes.pop("precision of engine", 0.0))
    largest: Name = max(sizes, key=lambda name: sizes[name], default="rest")
    if precision >= sizes.get(largest, 0.0):
        return _precision_advice(result, trainer_dtype, engine_dtype)
    return {
        "staleness": "Staleness is the largest part: lower --rollout-max-lag (or --sync-interval and "
        "--rollout-steps-per-phase); the correction and the learning rate's scaling are made for what stays.",
        "routing": "Routing is the largest part: turn on --rollout-router-replay rollout.",
        "cache": "The engine's cache is the largest part: what it recorded while it decoded is not what it computes "
        "from scratch; set --sync-verify every to see whether a weight update leaves something behind.",
        "rest": _REST_QUANTIZED if quantized else _REST,
    }[largest]


def _precision_advice(result: Report, trainer_dtype: str, engine_dtype: str) -> str:
    if trainer_dtype != engine_dtype:
        return (
            f"Precision is the largest part, and the two types differ ({trainer_dtype} in the trainer, {engine_dtype} "
            "in the engine): set --rollout-engine-dtype auto."
        )
    if trainer_dtype == "float32":
        return (
            "The two differ by more than FP32 explains: set --sync-verify every to see whether the engine computes "
            "something else."
        )
    if trainer_dtype == "bfloat16":
        gaps = {row.dtype: row.rounding.mean if row.between is None else row.between.mean for row in result.types}
        ratio = ""
        if gaps.get("float16") and "bfloat16" in gaps:
            ratio = f", which came out {gaps['bfloat16'] / gaps['float16']:.0f} times closer here"
        return (
            "Precision is the largest part: train and sample in FP16 (--fp16 --rollout-engine-dtype float16 in place "
            f"of --bf16){ratio}."
        )
    return "Precision is the largest part, and FP16 is the closest of the half types: only FP32 would be closer."


# ---------------------------------------------------------------------- the table


def table(result: Report) -> str:
    """The report as lines of text, for a terminal of 120 columns."""
    header = f"{'':<22}{'mean':>10}{'99%':>10}{'largest':>10}{'share':>8}"
    lines = [f"{result.tokens:,} tokens; differences of log-probs in nats a token", "", header]
    for component in result.components:
        share = "" if component.share is None else f"{round(100 * component.share, 1) + 0.0:.1f}%"
        figures = f"{absence(component):>30}" if component.size is None else _figures(component.size)
        lines.append(f"{component.name:<22}{figures}{share:>8}  {component.note}".rstrip())
    lines.append(f"{'all together':<22}{_figures(result.total)}{'100.0%':>8}")
    lines.append(f"{'as training sees it':<22}{_figures(result.as_trained)}{'':>8}  KL (k3) {result.kl:.2e}")
    lines += ["", f"{'data type':<22}{'mean':>10}{'99%':>10}{'largest':>10}"]
    for row in result.types:
        lines.append(f"{row.dtype + ' against fp32':<22}{_figures(row.rounding)}")
    for row in result.types:
        if row.between is not None:
            lines.append(f"{row.dtype + ', both sides':<22}{_figures(row.between)}")
    return "\n".join(lines)


def absence(component: Component) -> str:
    """Text in place of the figures of a row without figures."""
    return "not measured" if component.note.startswith("needs") else "none"


def _figures(size: Size) -> str:
    return "".join(f"{value:>10.1e}" for value in (size.mean, size.p99, size.largest))
