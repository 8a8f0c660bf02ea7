"""The split of trainer's and engine's log-probs, on numbers made by hand, and the advice that follows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from megatron_vcpo.diagnostics.mismatch.picture import draw
from megatron_vcpo.diagnostics.mismatch.report import Report, Scores, Size, TypeRow, advice, report, table

NOTES: Any = {
    "sampling transform": "sampled at temperature 1",
    "staleness": "needs --policy",
    "routing": "the model has no experts",
    "precision of engine": "needs --engine",
    "cache": "needs --engine",
    "rest": "precision of engine and cache, together",
}
TYPES = [
    TypeRow(dtype="float16", rounding=Size(mean=0.002, p99=0.003, largest=0.01), between=Size.of(np.array([-0.001]))),
    TypeRow(dtype="bfloat16", rounding=Size(mean=0.012, p99=0.04, largest=0.3), between=Size.of(np.array([0.01]))),
]


def scores(sizes: dict[str, float], tokens: int = 500, **more: Any) -> Scores:
    """A chain whose neighbours differ by independent noise of these standard deviations, from the record upwards."""
    rng = np.random.default_rng(0)
    chain = {"recorded": -rng.exponential(1.0, tokens)}
    last = "recorded"
    for name, size in sizes.items():
        chain[name] = chain[last] + size * rng.standard_normal(tokens)
        last = name
    return Scores(**chain, **more)


FULL = {"rescored": 0.001, "exact": 0.02, "routed": 0.01, "sampler_weights": 0.05, "trained": 0.3}


def test_rows_add_up_to_the_whole_difference_and_shares_to_one() -> None:
    given = scores(FULL)
    result = report(given, TYPES, NOTES)
    names = ["staleness", "routing", "precision of trainer", "precision of engine", "cache"]
    assert [c.name for c in result.components] == ["sampling transform", *names]
    pairs = ["trained", "sampler_weights", "routed", "exact", "rescored", "recorded"]
    whole = given.trained - given.recorded
    for name, first, second in zip(names, pairs, pairs[1:]):
        change = getattr(given, first) - getattr(given, second)
        row = result.of(name)  # type: ignore[arg-type]
        assert row.size is not None
        assert row.size.mean == pytest.approx(np.abs(change).mean())
        assert row.size.largest == np.abs(change).max()
        assert row.share == pytest.approx((change * whole).sum() / (whole**2).sum())
    assert sum(c.share or 0.0 for c in result.components) == pytest.approx(1.0)
    assert result.total.mean == pytest.approx(np.abs(whole).mean())
    assert result.kl == pytest.approx(np.mean(np.exp(whole) - 1 - whole))


def test_what_cannot_be_told_apart_is_one_row_and_what_is_not_known_is_never_zero() -> None:
    result = report(scores({"exact": 0.02, "trained": 0.1}), TYPES, NOTES)
    for name in ("sampling transform", "staleness", "routing", "precision of engine", "cache"):
        assert result.of(name).size is None  # type: ignore[arg-type]
    assert sum(c.share or 0.0 for c in result.components) == pytest.approx(1.0)
    lines = {line.split("  ")[0]: line for line in table(result).splitlines()}
    assert "not measured" in lines["staleness"]
    assert "needs --policy" in lines["staleness"]
    assert "not measured" in lines["cache"]
    assert "none" in lines["routing"]
    assert "together" in lines["rest"]


def test_the_sampling_transform_is_shown_beside_the_split_and_not_in_it() -> None:
    given = scores(FULL)
    tempered = Scores(**{name: getattr(given, name) for name in ("recorded", *FULL)}, untempered=given.trained - 0.25)
    row = report(tempered, TYPES, NOTES).of("sampling transform")
    assert row.size is not None
    assert row.size.mean == pytest.approx(0.25)
    assert row.share is None
    assert report(tempered, TYPES, NOTES).total == report(given, TYPES, NOTES).total


def test_replay_changes_what_training_sees() -> None:
    given = scores(FULL)
    replayed = Scores(**{name: getattr(given, name) for name in ("recorded", *FULL)}, replayed=given.recorded + 0.125)
    result = report(replayed, TYPES, NOTES)
    assert result.as_trained.mean == pytest.approx(0.125)
    assert result.total.mean > 0.2
    assert result.kl == pytest.approx(np.exp(0.125) - 1.125)


def sentence(sizes: dict[str, float], trainer: str = "bfloat16", engine: str = "bfloat16", **more: Any) -> str:
    result = report(scores(sizes), TYPES, NOTES)
    return advice(result, trainer_dtype=trainer, engine_dtype=engine, **more)


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        (FULL, "lower --rollout-max-lag"),
        (FULL | {"trained": 0.001, "routed": 0.4}, "--fp16 --rollout-engine-dtype float16 in place of --bf16), which"),
        (FULL | {"trained": 0.001, "sampler_weights": 0.4}, "--rollout-router-replay rollout"),
        (FULL | {"trained": 0.001, "rescored": 0.4}, "--sync-verify every"),
        (FULL | {"trained": 0.001, "exact": 0.4}, "--fp16"),
        ({"exact": 0.5, "trained": 0.1}, "say what they need"),
        (dict.fromkeys(FULL, 1e-6), "Nothing to turn"),
    ],
    ids=["staleness", "trainer's precision", "routing", "cache", "engine's precision", "rest", "nothing"],
)
def test_the_advice_names_the_switch_of_the_largest_part(sizes: dict[str, float], words: str) -> None:
    text = sentence(sizes)
    assert words in text
    assert text.endswith(".")


def test_the_advice_on_precision_depends_on_the_types() -> None:
    precision = FULL | {"trained": 0.001, "routed": 0.4}
    assert "10 times closer" in sentence(precision)  # between trainer and engine, where that is measured
    assert "--rollout-engine-dtype auto" in sentence(precision, "bfloat16", "float16")
    assert "only FP32" in sentence(precision, "float16", "float16")
    assert "more than FP32 explains" in sentence(precision, "float32", "float32")


def test_a_quantized_engine_is_named_where_its_side_is_the_largest_part() -> None:
    assert "drop --rollout-engine-quantization" in sentence({"exact": 0.5, "trained": 0.1}, quantized=True)


def test_a_switch_that_is_on_is_not_advised_again() -> None:
    assert "--rollout-max-lag" in sentence(FULL | {"sampler_weights": 0.4}, replayed=True)


def test_the_picture_is_drawn_from_all_rows_and_from_few(tmp_path: Path) -> None:
    few = report(scores({"exact": 0.0, "trained": 0.0}), [], NOTES)
    for number, result in enumerate((report(scores(FULL), TYPES, NOTES), few)):
        assert isinstance(result, Report)
        path = tmp_path / "new" / f"{number}.png"
        draw(result, "Staleness is the largest part: lower --rollout-max-lag.", path)
        with Image.open(path) as picture:
            assert picture.width > 1000
