"""From a saved batch to its report: which scores are needed, and what each one means."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron_vcpo.data.saved_batch import Origin, SavedBatchError
from megatron_vcpo.data.trajectory import Trajectory
from megatron_vcpo.diagnostics.mismatch.report import Name, Report, Scores, Size, TypeRow, Values, report
from megatron_vcpo.diagnostics.mismatch.scores import (
    TrainerModel,
    Weights,
    require_same_model,
    score_with_engine,
    trainer_model,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class MismatchOptions:
    """The options of a report."""

    trainer_dtype: str
    engine_dtype: str
    dtypes: Sequence[str]  # for the table of dtypes
    engine: bool  # whether to start vLLM
    scratch: Path  # folder for files that the engine needs
    tokenizer: Path | None = None  # needed by an engine if the checkpoint is Megatron's
    progress: Callable[[str], object] = lambda _: None


def usable(trajectories: Sequence[Trajectory], origin: Origin, limit: int) -> list[Trajectory]:
    """The first `limit` trajectories that have tokens, all sampled by one version.

    Raises:
        SavedBatchError: there is none.
    """
    found = [
        t for t in trajectories if t.response_mask.any() and bool((t.versions[t.response_mask] == origin.version).all())
    ]
    if not found:
        raise SavedBatchError(f"The batch holds no trajectory whose tokens are all of version {origin.version}.")
    return found[:limit]


def measure(
    trajectories: Sequence[Trajectory],
    origin: Origin,
    sampler: Weights,
    policy: Weights | None,
    options: MismatchOptions,
) -> Report:
    """Score the trajectories and make the report. Call it in `single_process`.

    Args:
        trajectories: from `usable`.
        origin: of the batch.
        sampler: the weights that sampled the batch.
        policy: the weights that train on the batch; None: staleness is not measured.
        options: of the report.
    """
    if policy is not None:
        require_same_model(sampler, policy)
    recorded = np.concatenate([t.behavior_logprobs[t.response_mask] for t in trajectories]).astype(np.float64)
    trainer = _Trainer(trajectories, origin, sampler, options)
    trainer.score_sampler()
    trained = trainer.score_policy(policy)
    engines = _engine_scores(trajectories, sampler, options)
    comparable = origin.temperature == 1.0 and not origin.quantized
    rescored = engines.get(options.engine_dtype) if comparable else None
    scores = Scores(
        recorded=recorded,
        trained=trained.own,
        replayed=trained.replayed,
        untempered=trained.untempered,
        sampler_weights=None if policy is None else trainer.own[options.trainer_dtype],
        routed=trainer.routed,
        exact=trainer.exact,
        rescored=rescored,
    )
    return report(scores, trainer.type_rows(engines), _notes(origin, sampler, policy, trainer.carries, options))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Trained:
    """The trainer's log-probs of the sampled tokens, [N] each, as in `Scores`."""

    own: Values
    replayed: Values | None
    untempered: Values | None


class _Trainer:
    """Scores with the trainer's model, in every dtype asked for."""

    def __init__(
        self, trajectories: Sequence[Trajectory], origin: Origin, sampler: Weights, options: MismatchOptions
    ) -> None:
        self.carries = sampler.num_experts > 0 and all(t.routed_experts is not None for t in trajectories)
        self.own: dict[str, Values] = {}  # dtype -> scores with the routers' own choice
        self.plain: dict[str, Values] = {}  # the same at temperature 1
        self.routed: Values | None = None  # with the reference's routes, in the trainer's dtype
        self.exact: Values
        self._trajectories = list(trajectories)
        self._origin = origin
        self._sampler = sampler
        self._options = options

    def score_sampler(self) -> None:
        """Score with the weights that sampled. fp32 comes first: its routes are the reference if the batch has none."""
        dtypes = dict.fromkeys(["float32", self._options.trainer_dtype, *self._options.dtypes])
        for dtype in dtypes:
            self._options.progress(f"trainer in {dtype}")
            with trainer_model(self._sampler, dtype) as model:
                self.own[dtype] = self._own(model)
                self.plain[dtype] = self.own[dtype] if self._plain else self._own(model, 1.0)
                if self._sampler.num_experts and dtype == "float32" and not self.carries:
                    self._trajectories = model.with_own_routes(self._trajectories)
                if self._sampler.num_experts and dtype == self._options.trainer_dtype:
                    self.routed = self._replayed(model)
                if dtype == "float32":
                    self.exact = self._replayed(model) if self.carries else self.own[dtype]

    def score_policy(self, policy: Weights | None) -> _Trained:
        """Score with the training weights in the trainer's dtype; without them, the weights that sampled stand in."""
        dtype = self._options.trainer_dtype
        replays = self.carries and self._origin.router_replay != "off"
        if policy is None:
            untempered = None if self._plain else self.plain[dtype]
            return _Trained(own=self.own[dtype], replayed=self.routed if replays else None, untempered=untempered)
        self._options.progress(f"trainer in {dtype}, weights of --policy")
        with trainer_model(policy, dtype) as model:
            return _Trained(
                own=self._own(model),
                replayed=self._replayed(model) if replays else None,
                untempered=None if self._plain else self._own(model, 1.0),
            )

    def type_rows(self, engines: dict[str, Values]) -> list[TypeRow]:
        """The rows of the table of dtypes, from the trainer's and the engine's scores at temperature 1."""
        rows = []
        for dtype in self._options.dtypes:
            between = Size.of(self.plain[dtype] - engines[dtype]) if dtype in engines else None
            rounding = Size.of(self.own[dtype] - self.own["float32"])
            rows.append(TypeRow(dtype=dtype, rounding=rounding, between=between))
        return rows

    @property
    def _plain(self) -> bool:
        return self._origin.temperature == 1.0

    def _own(self, model: TrainerModel, temperature: float | None = None) -> Values:
        return model.score(self._trajectories, temperature=temperature or self._origin.temperature)

    def _replayed(self, model: TrainerModel) -> Values:
        return model.score(self._trajectories, temperature=self._origin.temperature, routed=True)


def _engine_scores(trajectories: Sequence[Trajectory], sampler: Weights, options: MismatchOptions) -> dict[str, Values]:
    if not options.engine:
        return {}
    found = {}
    for dtype in dict.fromkeys([options.engine_dtype, *options.dtypes]):
        options.progress(f"engine in {dtype}")
        found[dtype] = score_with_engine(
            sampler, dtype, trajectories, scratch=options.scratch, tokenizer=options.tokenizer
        )
    return found


def _notes(
    origin: Origin, sampler: Weights, policy: Weights | None, carries: bool, options: MismatchOptions
) -> dict[Name, str]:
    parts = "quantization, precision of engine and cache" if origin.quantized else "precision of engine and cache"
    notes: dict[Name, str] = {"rest": f"{parts}, together"}
    if origin.temperature == 1.0:
        notes["sampling transform"] = "sampled at temperature 1; top-p and top-k are refused"
    else:
        notes["sampling transform"] = f"temperature {origin.temperature:g} on both sides; this if left out by one"
    if policy is None:
        notes["staleness"] = "needs --policy, the weights that trained on the batch"
    if not sampler.num_experts:
        notes["routing"] = "the model has no experts"
    elif carries:
        notes["routing"] = f"against the batch's routes (--rollout-router-replay {origin.router_replay})"
    else:
        notes["routing"] = "against the fp32 trainer's experts: the batch carries none"
    if not options.engine:
        notes["precision of engine"] = notes["cache"] = "needs --engine, which starts vLLM"
    elif origin.quantized:
        notes["precision of engine"] = notes["cache"] = "needs a batch that no quantized engine sampled"
    elif origin.temperature != 1.0:
        text = "needs a batch sampled at temperature 1, at which vLLM scores given tokens"
        notes["precision of engine"] = notes["cache"] = text
    return notes
