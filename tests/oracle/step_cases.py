"""Minibatches and settings on which steps are compared with tests/oracle/autograd_step.py, and what is expected there.

Every value of every setting occurs among the cases, in random company; a seed makes them the same everywhere.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from megatron_vcpo.config import VCPOConfig
from megatron_vcpo.data.trajectory import Trajectory
from tests.oracle.autograd_step import Scored, Step, autograd_step, score
from tests.oracle.estimator import TABLE
from tests.oracle.layouts import named_weights
from tests.oracle.plain_gpt import PlainGPT, Weights

MAX_RESPONSE, LEARNING_RATE, ADAM_EPSILON = 32, 1e-2, 1e-3  # the last two are those of tests/oracle/layouts.py
POLICY_MARK, REFERENCE_MARK = 60, 59  # tokens of spoilt trajectories alone
_EMBEDDING = "model.embed_tokens.weight"

# What makes a trajectory unusable; the entropy and the reference only where they are asked for.
SPOILT_BEHAVIOR = {"behavior nan": math.nan, "behavior -inf": -math.inf, "behavior +inf": math.inf}
SPOILT_REWARD = {"reward nan": math.nan, "reward -inf": -math.inf, "reward +inf": math.inf}
SPOILT_POLICY = {"policy nan": math.nan, "policy -inf": -math.inf}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One step."""

    name: str
    config: VCPOConfig
    tied: bool = False
    clip: float = 4.0
    spoilt: dict[int, str] = field(default_factory=dict)  # index of a trajectory -> what is not finite in it
    everywhere: bool = True  # in every layout, not on one process alone


def model_of(case: Case, *, moe: bool) -> PlainGPT:
    """The model of a case, dense or with experts."""
    return PlainGPT(tied=case.tied, experts=4, ffn=32) if moe else PlainGPT(tied=case.tied)


def frozen_weight(model: PlainGPT, *, spoilt: bool = False) -> Callable[[str], torch.Tensor]:
    """Weights of the KL reference, fp32; spoilt, they give NaN from REFERENCE_MARK on."""
    named = named_weights(model.shapes)

    def read(name: str) -> torch.Tensor:
        values = named(name)
        if spoilt and name == _EMBEDDING:
            values[REFERENCE_MARK] = math.nan
        return values

    return read


def policy_weight(model: PlainGPT) -> Callable[[str], torch.Tensor]:
    """Weights of the policy, fp32: those of the reference, moved a little."""
    named = named_weights(model.shapes)
    return lambda name: named(name) + 0.1 * (named_weights({f"{name}, moved": model.shapes[name]})(f"{name}, moved"))


# ---------------------------------------------------------------------- minibatches

GROUPS = (5, 4, 3, 3, 1)
EMPTY, MASKED, TRUNCATED = 6, 10, 1  # indices
_GROUP_IDS = (7, 2**33, 2, 40, 11)
_EQUAL_REWARDS = 3  # group


def _log_ratios(rng: np.random.Generator, index: int, length: int) -> np.ndarray:
    """[length] wanted d_t: on every side of every bound, whatever the correction."""
    ratios = 0.12 * rng.standard_normal(length)
    if length < 3:
        return ratios
    match index:
        case 0:  # w above its bound
            ratios += (math.log(12.0) - ratios.sum()) / length
        case 2 | 9:  # g within the bounds of gspo
            ratios += 1e-4 * (1 if index == 2 else -1) - ratios.mean()
        case 3:  # tokens above and below the bounds of all corrections
            ratios[0], ratios[-1] = 2.3, -2.0
        case 5:  # g above its bound
            ratios += 0.9
        case 12:  # a token that is vetoed, and one that makes up for it
            ratios[0], ratios[-1] = -4.0, 3.5
    return ratios


@functools.cache
def _tokens() -> tuple[Trajectory, ...]:
    """The trajectories, with the wanted log-ratios in the place of log-probs."""
    rng = np.random.default_rng(3)
    out: list[Trajectory] = []
    for group, size in enumerate(GROUPS):
        for index in range(size):
            length = {EMPTY: 0, TRUNCATED: MAX_RESPONSE, 5: 4}.get(len(out), int(rng.integers(5, 24)))
            mask = rng.random(length) < 0.85
            mask[:1] = mask[-1:] = len(out) != MASKED
            mask &= len(out) != MASKED
            wanted = np.full(length, np.nan)  # masked out, anything may stand there
            wanted[mask] = _log_ratios(rng, len(out), int(mask.sum()))
            out.append(
                Trajectory(
                    prompt_ids=rng.integers(0, REFERENCE_MARK, 8 if length > 30 else int(rng.integers(2, 9))).astype(
                        np.int32
                    ),
                    response_ids=rng.integers(0, REFERENCE_MARK, length).astype(np.int32),
                    behavior_logprobs=wanted.astype(np.float32),
                    versions=np.zeros(length, np.int32),
                    response_mask=mask,
                    reward=0.625 if group == _EQUAL_REWARDS else int(rng.integers(-8, 9)) / 8,
                    group_id=_GROUP_IDS[group],
                    index=index,
                    truncated=length == MAX_RESPONSE,
                )
            )
    return tuple(out)


def spoil(trajectory: Trajectory, kind: str) -> Trajectory:
    """The same with a number that is not finite, or with a token that makes the trainer's number so."""
    if kind in SPOILT_REWARD:
        return dataclasses.replace(trajectory, reward=SPOILT_REWARD[kind])
    first = int(np.flatnonzero(trajectory.response_mask)[0])
    if kind in SPOILT_BEHAVIOR:
        logprobs = trajectory.behavior_logprobs.copy()
        logprobs[first] = SPOILT_BEHAVIOR[kind]
        return dataclasses.replace(trajectory, behavior_logprobs=logprobs)
    if kind == "reference":
        prompt = trajectory.prompt_ids.copy()
        prompt[-1] = REFERENCE_MARK
        return dataclasses.replace(trajectory, prompt_ids=prompt)
    response = trajectory.response_ids.copy()
    response[first] = POLICY_MARK
    return dataclasses.replace(trajectory, response_ids=response)


def _spoilt_numbers(scored: Scored, kind: str) -> Scored:
    """What the oracle sees of it; it is to be left out, so its other numbers do not matter."""
    changes: dict[str, Any] = {"trajectory": spoil(scored.trajectory, kind)}
    if kind in SPOILT_POLICY:
        changes["policy"] = torch.full_like(scored.policy, SPOILT_POLICY[kind])
    elif kind in ("entropy", "reference"):
        changes[kind] = torch.full_like(scored.policy, math.nan)
    return dataclasses.replace(scored, **changes)


@dataclass
class Scene:
    """A model and the minibatch that goes with it, scored."""

    model: PlainGPT
    weights: Weights
    minibatch: list[Scored]

    @staticmethod
    @functools.cache
    def of(model: PlainGPT) -> Scene:
        """fp64 weights, and trajectories whose log-ratios under them are the wanted ones."""
        frozen, policy = frozen_weight(model), policy_weight(model)
        weights = {name: policy(name).double().requires_grad_() for name in model.shapes}
        before = {name: frozen(name).double() for name in model.shapes}
        minibatch = []
        for trajectory in _tokens():
            scored = score(model, weights, before, trajectory)
            logprobs = trajectory.behavior_logprobs.copy()
            mask = trajectory.response_mask
            logprobs[mask] = (scored.policy.detach().numpy() - logprobs[mask]).astype(np.float32)
            minibatch.append(
                dataclasses.replace(scored, trajectory=dataclasses.replace(trajectory, behavior_logprobs=logprobs))
            )
        return Scene(model, weights, minibatch)

    def step(self, case: Case) -> tuple[list[Trajectory], Step]:
        """What the case trains on, and what is expected of it."""
        minibatch = list(self.minibatch)
        for i, kind in case.spoilt.items():
            minibatch[i] = _spoilt_numbers(minibatch[i], kind)
        step = autograd_step(
            minibatch,
            self.weights,
            case.config,
            max_response_length=MAX_RESPONSE,
            learning_rate=LEARNING_RATE,
        )
        return [s.trajectory for s in minibatch], step


# ---------------------------------------------------------------------- settings

_KL = {"kl_coefficient": 0.1}
_OTHERS: dict[str, tuple[dict[str, Any], ...]] = {
    "scope": ({"baseline_scope": "group"}, {"baseline_scope": "minibatch"}),
    "normalization": tuple({"reward_normalization": name} for name in ("none", "group-std", "minibatch-std")),
    "aggregation": tuple(
        {"aggregation": name}
        for name in ("seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm", "token-mean")
    ),
    "kl": ({}, *({**_KL, "kl_estimator": name} for name in ("k1", "k2", "k3"))),
    "entropy": ({}, {"entropy_coefficient": 0.05}),
    "veto": ({}, {}, {"veto_ratio": 0.05}),
    "packing": ({"tokens_per_micro_batch": 45}, {"tokens_per_micro_batch": 130}, {"tokens_per_micro_batch": 600}),
    "chunk": ({}, {}, {"logit_chunk": 7}),
    "rate": (
        {},
        {"ess_scaling": "linear", "ess_reference": "0.7"},
        {"ess_scaling": "off"},
        {"ess_floor": 0.9, "ess_reference": "0.9"},
        {"ess_weights": "capped", "correction_upper": 1.5},
    ),
}
_CLIPS = (0.01, 0.1, 1.0, 1e6)
_MEANS = ("none", "mean", "leave-one-out")
_NONLINEAR = ("gspo", "ppo-clip")


def _random_cases() -> list[Case]:
    """Every correction with every energy and both optimal baselines, and with a baseline that is none of those."""
    rng = np.random.default_rng(11)
    rows: list[dict[str, Any]] = []
    for i, correction in enumerate(TABLE):
        for j, energy in enumerate(("logit", "length", "exact")):
            baseline = ("opob", "opob-leave-one-out")[(i + j) % 2]
            rows.append({"correction": correction, "energy": energy, "baseline": baseline})
        rows.append({"correction": correction, "baseline": _MEANS[i % 3]})
    columns = {
        name: [values[k] for k in rng.permutation(np.resize(np.arange(len(values)), len(rows)))]
        for name, values in _OTHERS.items()
    }
    cases = []
    for k, row in enumerate(rows):
        fields = {**row, **{key: v for column in columns.values() for key, v in column[k].items()}}
        if fields.get("energy") == "exact":
            fields["energy_method"] = _energy_method(fields, k)
        name = f"{k}: {row['correction']} {row['baseline']} {row.get('energy', '')}".rstrip()
        cases.append(
            Case(
                name=name,
                config=VCPOConfig(**fields),
                tied=bool((k // 2 + k // 8) % 2),
                clip=_CLIPS[int(rng.integers(4))],
            )
        )
    return cases


def _energy_method(fields: dict[str, Any], number: int) -> str:
    if fields["correction"] in _NONLINEAR:
        return "two-pass"
    if (fields["baseline"], fields["baseline_scope"]) == ("opob", "minibatch"):
        return "accumulators"
    return ("two-pass", "deferred", "deferred")[number % 3]


_WIDE = {"correction_lower": 0.1, "correction_upper": 0.15}
_BOUNDED = [
    Case(name="gspo with wide bounds", config=VCPOConfig(correction="gspo", **_WIDE)),
    Case(name="cispo with near bounds", config=VCPOConfig(correction="cispo", tokens_per_micro_batch=45, **_WIDE)),
    Case(
        name="the defaults, packed whole",
        config=VCPOConfig(tokens_per_micro_batch=600),
    ),
]

# One of every kind, in groups of five, four and three; a group of one goes as a whole.
_MANY = {
    0: "behavior nan",
    3: "behavior -inf",
    5: "reward nan",
    7: "policy nan",
    9: "reward +inf",
    11: "behavior +inf",
    15: "reward -inf",
}
_GROUP_BUT_ONE = {0: "behavior nan", 1: "reward nan", 2: "behavior nan", 3: "policy -inf"}
_WHOLE_GROUP = dict.fromkeys(range(5), "behavior nan")
_EVERYTHING = dict.fromkeys(range(sum(GROUPS)), "reward nan")
_WITHOUT_SCALE = {"reward_normalization": "none", "tokens_per_micro_batch": 130}
_EXACT = {"energy": "exact", "tokens_per_micro_batch": 130}


def _spoilt(name: str, spoilt: dict[int, str], *, everywhere: bool = True, **fields: Any) -> Case:
    return Case(name=f"not finite: {name}", config=VCPOConfig(**fields), spoilt=spoilt, everywhere=everywhere)


SPOILT_CASES = [
    *(
        _spoilt(f"{kind}, defaults", {3: kind}, everywhere=False)
        for kind in [*SPOILT_BEHAVIOR, *SPOILT_REWARD, *SPOILT_POLICY]
    ),
    *(_spoilt(f"many, {b}", _MANY, baseline=b, **_WITHOUT_SCALE) for b in (*_MEANS, "opob", "opob-leave-one-out")),
    *(
        _spoilt(f"many, {n}", _MANY, baseline="none", reward_normalization=n, tokens_per_micro_batch=45)
        for n in ("group-std", "minibatch-std")
    ),
    *(
        _spoilt(f"many, {b} over the minibatch", _MANY, baseline=b, baseline_scope="minibatch", **_WITHOUT_SCALE)
        for b in ("mean", "leave-one-out", "opob")
    ),
    *(
        _spoilt(f"many, {a}", _MANY, aggregation=a, energy="length", tokens_per_micro_batch=130)
        for a in ("seq-mean-token-sum", "seq-mean-token-sum-norm", "token-mean")
    ),
    _spoilt("many, token-mean alone", _MANY, aggregation="token-mean", baseline="none", reward_normalization="none"),
    _spoilt("many, exact in two passes", _MANY, energy_method="two-pass", **_EXACT),
    _spoilt("many, exact deferred", _MANY, energy_method="deferred", aggregation="token-mean", **_EXACT),
    _spoilt("many, exact deferred, packed whole", _MANY, energy="exact", tokens_per_micro_batch=600),
    _spoilt("many, accumulators", _MANY, energy_method="accumulators", baseline_scope="minibatch", **_EXACT),
    _spoilt("many, token level", _MANY, correction="token-tis", veto_ratio=0.05, **_KL, entropy_coefficient=0.05),
    _spoilt("many, clipped ratios", _MANY, correction="gspo", aggregation="token-mean", correction_upper=0.1),
    _spoilt("a reference", {3: "reference", 7: "reference"}, **_KL),
    _spoilt("a reference, token-mean", {3: "reference"}, **_KL, aggregation="token-mean", baseline="mean"),
    _spoilt("a reference, exact", {3: "reference"}, **_KL, **_EXACT),
    _spoilt("an entropy", {3: "entropy", 8: "entropy"}, entropy_coefficient=0.05),
    _spoilt("an entropy, exact", {3: "entropy"}, entropy_coefficient=0.05, **_EXACT),
    _spoilt("a group but one", _GROUP_BUT_ONE, baseline="opob-leave-one-out"),
    _spoilt("a whole group", _WHOLE_GROUP, baseline="opob", baseline_scope="minibatch"),
    _spoilt("everything", _EVERYTHING, ess_floor=0.25),
]
CASES = [*_random_cases(), *_BOUNDED, *SPOILT_CASES]


def expected_steps(*, moe: bool) -> dict[str, tuple[list[Trajectory], Step]]:
    """Trajectories and the expected step of every case."""
    return {case.name: Scene.of(model_of(case, moe=moe)).step(case) for case in CASES}
