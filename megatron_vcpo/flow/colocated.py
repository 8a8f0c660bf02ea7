"""RolloutFlow: trajectories come to a step and weights go back, around the colocated engine.

One iteration: publish (when due) -> generate -> judge -> buffer -> [step] -> evaluate -> log. Everything here runs
alike on every rank, so that the collectives inside line up.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch

from megatron_vcpo.checkpoint.hf_config import write_model_dir
from megatron_vcpo.checkpoint.quantize.recipe import QuantizationRecipe
from megatron_vcpo.config import ConfigError, PluginConfig
from megatron_vcpo.data.saved_batch import Origin, batch_path, save_batch
from megatron_vcpo.data.trajectory import Trajectory
from megatron_vcpo.engines.process import ProcessEngine
from megatron_vcpo.engines.protocol import RolloutEngine
from megatron_vcpo.engines.quantized import QuantizedEngine
from megatron_vcpo.engines.vllm.engine import VLLMEngine, VLLMSettings
from megatron_vcpo.flow.base import BaseFlow, StepBatch
from megatron_vcpo.flow.buffer import TrajectoryBuffer
from megatron_vcpo.flow.evaluation import evaluate
from megatron_vcpo.flow.policy_model import model_description, padded_vocab_size
from megatron_vcpo.flow.routes import mismatch_with_and_without, with_trainer_routes
from megatron_vcpo.mcore.reductions import collective_device
from megatron_vcpo.mcore.step.policy_step import PolicyStep
from megatron_vcpo.models.description import ModelFacts
from megatron_vcpo.models.naming import unwrap
from megatron_vcpo.observability.metrics import MetricsFileError
from megatron_vcpo.observability.samples import SamplesLog
from megatron_vcpo.patches import megatron_cpu, torch_cuda_alias, vllm_cpu_int8_saturation
from megatron_vcpo.rollout.collector import EnginePlace, RolloutCollector
from megatron_vcpo.rollout.inputs import Inputs, environment_arguments
from megatron_vcpo.rollout.rewards.pool import RewardPool
from megatron_vcpo.rollout.sampler import PromptSampler
from megatron_vcpo.rollout.stopping import describe_stops
from megatron_vcpo.runtime import phases
from megatron_vcpo.runtime.agreement import raise_together
from megatron_vcpo.sync.errors import SyncError
from megatron_vcpo.sync.synchronizer import WeightSynchronizer
from megatron_vcpo.sync.verify import QUANTIZED_TOLERANCE, compare_logprobs

_VERIFIED_TRAJECTORIES = 32  # compared with the trainer after a publication
_EVAL_SEED = 0x5EED
_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


class RolloutFlow(BaseFlow):
    """The colocated flow: every process holds a trainer shard and a share of an engine, taking turns."""

    def __init__(self, args: argparse.Namespace, config: PluginConfig, inputs: Inputs) -> None:
        super().__init__(args, config, inputs)
        rollout = config.rollout
        self.place = EnginePlace.of(args.rank, args.world_size, rollout.engine_tensor_parallel_size)
        self.device = collective_device()
        self.buffer = TrajectoryBuffer(max_lag=rollout.max_lag)
        self.sampler = PromptSampler(
            inputs.environment,
            inputs.tokenizer,
            seed=int(rollout.seed or 0),
            max_length=int(rollout.max_prompt_length or 0),
            chat=rollout.chat_template,
        )
        self._rewards: dict[str, RewardPool | None] = {}
        self._engine: RolloutEngine | None = None
        self._syncs = 0
        self._probe_due = False
        self._samples: SamplesLog | None = None

    # ------------------------------------------------------------------ start and end

    def start(self, *, model: list[Any], optimizer: Any) -> None:
        """Build the engine, publish the first weights, and evaluate them where the run is new."""
        super().start(model=model, optimizer=optimizer)
        self._optimizer = optimizer
        self.say(f"a response ends at {describe_stops(self.config.rollout, self.inputs.tokenizer)}")
        self._open_samples()
        splits = ["train", *(["eval"] if self.config.rollout.eval_interval else [])]
        for split in splits:
            self._rewards[split] = self._reward_pool(split) if self.place.leader else None
        self._engine = self._build_engine(model)
        self.synchronizer = self._build_synchronizer(model)
        self.collector = RolloutCollector(
            engine=self._engine,
            sampler=self.sampler,
            rewards=self._rewards["train"],
            decode=self.inputs.decode,
            config=self.config.rollout,
            place=self.place,
            device=self.device,
        )
        with self.timer("sync"):
            self._publish(model)
        if self.config.rollout.eval_interval and self.args.iteration == 0:
            self._evaluate()
            self.log({"iteration": 0, "train_iters": int(self.args.train_iters), **self._extra, **self._timed()})

    def _open_samples(self) -> None:
        failure: MetricsFileError | None = None
        if self.config.rollout.save_trajectories and self.args.rank == 0:
            try:
                self._samples = SamplesLog(
                    self.run_dir,
                    next_group=self.sampler.drawn,
                    decode_prompt=self.inputs.tokenizer.decode,
                    decode_response=self.inputs.decode,
                )
            except OSError as error:
                failure = MetricsFileError(
                    f"samples.jsonl in {self.run_dir} could not be opened ({error}); make room or the folder writable, "
                    "or choose another one with --rollout-run-dir."
                )
        raise_together(failure)

    def _reward_pool(self, split: str) -> RewardPool:
        rollout = self.config.rollout
        return RewardPool(
            rollout.environment,
            split=split,  # type: ignore[arg-type]
            seed=int(rollout.seed or 0),
            config=environment_arguments(self.config),
            prompts_file=rollout.prompts if split == "train" else rollout.eval_prompts,
            workers=rollout.reward_workers,
            timeout=rollout.reward_timeout,
        )

    @property
    def _dtype_name(self) -> str:
        chosen = self.config.rollout.engine_dtype
        return str(self.args.params_dtype).removeprefix("torch.") if chosen == "auto" else chosen

    def _build_engine(self, model: list[Any]) -> RolloutEngine:
        rollout = self.config.rollout
        quantized, folder = rollout.engine_quantization, self.config.vcpo.load_hf
        own_tokenizer = quantized is None and folder is None  # copied to the folder that is written
        if own_tokenizer:
            target = self.run_dir / "engine_model"
            failure: Exception | None = None
            if self.args.rank == 0:
                facts = ModelFacts.from_args(self.args, self.vocab_size)
                try:
                    write_model_dir(
                        target, unwrap(model[0]).config, facts, self.inputs.files, dtype=_DTYPES[self._dtype_name]
                    )
                except (ValueError, OSError) as error:
                    failure = error
            raise_together(failure)
            folder = str(target)
        settings = VLLMSettings(
            model_dir=str(quantized or folder),
            tokenizer_dir=None if own_tokenizer else rollout.tokenizer,
            dtype=self._dtype_name,  # type: ignore[arg-type]
            max_model_len=int(rollout.max_prompt_length or 0) + rollout.max_response_length,
            kv_cache_bytes=rollout.engine_kv_cache_bytes,
            max_sequences=rollout.engine_max_sequences,
            tensor_parallel_size=rollout.engine_tensor_parallel_size,
            seed=int(rollout.seed or 0),
            return_routes=rollout.router_replay == "rollout",
            log_file=str(self.run_dir / f"engine_rank{self.args.rank}.log"),
        )
        if rollout.engine_placement == "process":
            sync = self.config.sync
            return ProcessEngine(settings, rank=self.args.rank, timeout=sync.timeout, bucket_bytes=sync.bucket_bytes)
        engine = VLLMEngine(settings)
        if megatron_cpu.active():
            torch_cuda_alias.hide_cuda()
        if quantized is not None:
            if vllm_cpu_int8_saturation.in_use():
                self.say(
                    "this processor adds INT8 products in 16 bits, which saturate: the engine keeps its INT8 weights "
                    "in two halves, which is exact and takes twice the time (docs/quantization.md)"
                )
            return QuantizedEngine(engine, QuantizationRecipe(quantized))
        return engine

    def _build_synchronizer(self, model: list[Any]) -> WeightSynchronizer:
        description = model_description(self.args, self.config, self.inputs, model)
        assert self._engine is not None
        return WeightSynchronizer(
            model,
            description.family,
            description.shape(padded_vocab_size(model, description.tied_embeddings)),
            self.groups,
            self._engine,
            self.config.sync,
            dtype=_DTYPES[self._dtype_name],
        )

    def close(self) -> None:
        """End the reward processes and the engine."""
        for pool in self._rewards.values():
            if pool is not None:
                pool.close()
        self._rewards = {}
        if self._engine is not None:
            self._engine.shutdown()
            self._engine = None

    # ------------------------------------------------------------------ one iteration

    def next_minibatch(self, *, model: list[Any], step: PolicyStep, forward_backward: Any) -> StepBatch:
        """From the buffer, after a rollout phase where it is empty."""
        if not len(self.buffer):
            self._rollout_phase(model, step, forward_backward)
        taken = self.buffer.take(self.version)
        self.count("refused_stale", taken.refused_stale)
        return StepBatch(trajectories=taken.trajectories, lags=taken.lags, retries=taken.retries)

    def put_back(self, batch: StepBatch) -> None:
        """To the head of the buffer: no version has passed, so nothing has aged."""
        self.buffer.put_back(batch.trajectories, retries=batch.retries + 1)

    def _rollout_phase(self, model: list[Any], step: PolicyStep, forward_backward: Any) -> None:
        assert self._engine is not None
        if self._engine.version is None or self.version - self._engine.version >= self.config.sync.interval:
            with self.timer("sync"):
                self._publish(model)
        phase = self.collector.collect(self.config.staleness.steps_per_phase)
        for name, seconds in phase.seconds.items():
            self.add_seconds(name, seconds)
        self.count("rejected_rewards", phase.rejected)
        for kind, number in phase.rejected_by_kind.items():
            if number:
                self.count(f"rejected_{kind}", number)
        self.counters["skipped_prompts"] = float(self.sampler.skipped)
        if self.config.rollout.router_replay == "training":
            phases.enter("record routes")
            with self.timer("record_routes"):
                phase.minibatches = with_trainer_routes(
                    phase.minibatches,
                    step=step,
                    model=model,
                    forward_backward=forward_backward,
                    num_experts=int(self.args.num_experts),
                    device=self.device,
                )
        refused = self.buffer.add(phase.minibatches)
        self.count("refused_unfit", len(refused))
        for sentence in refused[:3]:
            self.say(f"refused {sentence}")
        if self._samples is not None:
            assert self._engine.version is not None
            chosen = [t for m in phase.minibatches for t in m][: self.config.rollout.save_trajectories]
            self._samples.append(chosen, version=self._engine.version)
        if self.config.rollout.save_batch and self.args.rank == 0:
            self._save_batch([t for m in phase.minibatches for t in m][: self.config.rollout.save_batch])
        if self._engine.version == self.version and self._probe_due:
            with self.timer("sync"):
                self._verify(phase.minibatches, model, step, forward_backward)

    def _save_batch(self, trajectories: list[Trajectory]) -> None:
        """Write a phase's trajectories for tools/mismatch_report.py; rank 0 only."""
        assert self._engine is not None
        assert self._engine.version is not None
        origin = Origin(
            version=self._engine.version,
            temperature=self.config.rollout.temperature,
            engine_dtype=self._dtype_name,
            trainer_dtype=str(self.args.params_dtype).removeprefix("torch."),
            router_replay=self.config.rollout.router_replay,
            quantized=self.config.rollout.engine_quantization is not None,
        )
        save_batch(batch_path(self.run_dir, origin.version), trajectories, origin)

    def after_step(self, metrics: dict[str, float], *, batch: StepBatch, success: bool, model: list[Any]) -> None:
        """Evaluate where it is due, then log."""
        done = self.args.curr_iteration + 1
        interval = self.config.rollout.eval_interval
        if interval and (done % interval == 0 or done == self.args.train_iters):
            assert self._engine is not None
            version = self.version + int(success)
            if self._engine.version != version:
                with self.timer("sync"):
                    self._publish(model, version)
            self._evaluate()
        super().after_step(metrics, batch=batch, success=success, model=model)

    def _publish(self, model: list[Any], version: int | None = None) -> None:
        from megatron.training import training

        phases.enter("publish weights")
        if self.args.overlap_param_gather:
            # Replicas are stale after an optimizer step: the gather would only run before the next forward pass.
            training.force_param_sync(model, optimizer=self._optimizer)
        verify = self.config.sync.verifies(self._syncs)
        report = self.synchronizer.publish(self.version if version is None else version, verify=verify)
        self._syncs += 1
        self._probe_due |= verify
        if verify and report.unreadable:
            self.say(
                f"verified the weights of version {report.version}, but for {len(report.unreadable)} tensors that the "
                f"engine keeps packed ({report.unreadable[0]}, ...): there the log-probs decide"
            )

    def _evaluate(self) -> None:
        environment = self.inputs.eval_environment
        assert self._engine is not None
        assert environment is not None
        phases.enter("evaluate")
        with self.timer("eval"):
            result = evaluate(
                engine=self._engine,
                environment=environment,
                rewards=self._rewards["eval"],
                tokenizer=self.inputs.tokenizer,
                decode=self.inputs.decode,
                config=self.config.rollout,
                seed=_EVAL_SEED,
                place=self.place,
                device=self.device,
            )
        self._extra |= {
            "eval/reward": result.reward,
            "eval/length": result.length,
            "eval/responses": float(result.responses),
            "eval/rejected": float(result.rejected),
        }

    def _verify(
        self, minibatches: list[list[Trajectory]], model: list[Any], step: PolicyStep, forward_backward: Any
    ) -> None:
        """Compare the engine's log-probs with the trainer's on what was just generated."""
        probe = [t for m in minibatches for t in m if len(t.response_ids)][:_VERIFIED_TRAJECTORIES]
        if not probe:
            return
        phases.enter("verify the engine")
        ours = step.logprobs_of(probe, model=model, forward_backward=forward_backward)
        failure: SyncError | None = None
        if ours:
            try:
                compare_logprobs(
                    [ours[i] for i in sorted(ours)],
                    [probe[i].behavior_logprobs for i in sorted(ours)],
                    dtype=_DTYPES[self._dtype_name],
                    tolerance=self._verify_tolerance,
                    version=self.version,
                )
            except SyncError as error:
                failure = error
        raise_together(failure)
        if self.config.rollout.router_replay == "rollout":
            self._extra |= mismatch_with_and_without(
                minibatches[0], step=step, model=model, forward_backward=forward_backward, device=self.device
            )
        self._probe_due = False

    @property
    def _verify_tolerance(self) -> float | None:
        """Of the check of log-probs, in nats; None: what the engine's type explains."""
        given = self.config.sync.verify_tolerance
        return QUANTIZED_TOLERANCE if given is None and self.config.rollout.engine_quantization else given

    # ------------------------------------------------------------------ state

    def state_dict(self) -> dict[str, Any]:
        """Version, counters, the prompts' cursor and the trajectories that wait."""
        return {
            **super().state_dict(),
            "task": self._task,
            "sampler": self.sampler.state_dict(),
            "buffer": self.buffer.state_dict(),
        }

    @property
    def _task(self) -> str:
        rollout = self.config.rollout
        return f"{rollout.environment} {rollout.environment_config} {rollout.prompts or ''}".strip()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a saved state; the engine has no weights then, so the first act is a publication.

        Raises:
            ConfigError: the state is of another task: its waiting trajectories were judged by other rewards.
        """
        if state["task"] != self._task:
            raise ConfigError(
                f"The checkpoint's rollouts are of the task {state['task']!r}, this run's of {self._task!r}: give the "
                "same --rollout-environment flags, or --finetune to start a new run from its weights."
            )
        super().load_state_dict(state)
        self.sampler.load_state_dict(state["sampler"])
        self.buffer.load_state_dict(state["buffer"])
