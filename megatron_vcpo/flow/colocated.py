"""ColocatedLoop: engines and trainer take turns on the same devices, in one process or in a process each.

                                      a phase feeds several steps
publish ──► generate ──► judge ──► admit ─────► take ──► train ──► settle ──► log
   ▲         engine     reward    buffer      (age       Megatron     │
   │                   processes              bound)     and VCPO     │
   └──────────────── weights of the next version ◄────────────────────┘

The first four are only due when no minibatch waits.

publish   the current version's weights go to the engine, if they are due           flow/publisher.py, sync/
generate  prompts are drawn, and the engine samples responses                       rollout/, engines/
judge     rewards are computed; every rank gets the same trajectories               rollout/
admit     trajectories that cannot be trained on are refused, the others wait       flow/buffer.py
take      one step's trajectories, without those that are now too old               flow/buffer.py
train     pack, score, forward and backward, rho, learning rate, optimizer step     flow/trainer.py, mcore/
settle    the outcome advances the version, or keeps an overflowed minibatch        flow/loop.py
evaluate  the held-out reward is measured if due, publishing first if need be       flow/evaluation.py
log       one line is written                                                       flow/journal.py
"""

from __future__ import annotations

import argparse
import contextlib
import logging
from collections.abc import Sequence
from typing import Any, Literal

from megatron_vcpo.config import ConfigError, PluginConfig
from megatron_vcpo.data.minibatch import Minibatch, Refusal
from megatron_vcpo.data.saved_batch import Origin, batch_path, save_batch
from megatron_vcpo.data.trajectory import Trajectory
from megatron_vcpo.flow import assembly
from megatron_vcpo.flow.buffer import TrajectoryBuffer
from megatron_vcpo.flow.evaluation import EVALUATION_SEED, evaluate
from megatron_vcpo.flow.loop import Loop
from megatron_vcpo.flow.routes import mismatch_with_and_without, with_trainer_routes
from megatron_vcpo.flow.trainer import Trainer
from megatron_vcpo.mcore.reductions import collective_device
from megatron_vcpo.rollout.collector import EnginePlace, RolloutCollector, RolloutPhase
from megatron_vcpo.rollout.inputs import Inputs
from megatron_vcpo.rollout.rewards.pool import RewardPool
from megatron_vcpo.rollout.sampler import PromptSampler
from megatron_vcpo.rollout.stopping import describe_stops
from megatron_vcpo.runtime import phases
from megatron_vcpo.runtime.logs import log_single_rank

logger = logging.getLogger(__name__)

_SHOWN_REFUSALS = 3  # most refusals that are explained at a time


class ColocatedLoop(Loop):
    """Reinforcement learning where every process holds a trainer shard and a share of an engine."""

    def __init__(self, args: argparse.Namespace, config: PluginConfig, inputs: Inputs) -> None:
        super().__init__(args, config, inputs)
        rollout = config.rollout
        self.place = EnginePlace.of(args.rank, args.world_size, rollout.engine_tensor_parallel_size)
        self.device = collective_device()
        self.buffer = TrajectoryBuffer(max_lag=config.staleness.max_lag)
        self.sampler = PromptSampler(
            inputs.environment,
            inputs.tokenizer,
            seed=int(rollout.seed or 0),
            max_length=int(rollout.max_prompt_length or 0),
            chat=rollout.chat_template,
        )
        self._rewards: dict[str, RewardPool | None] = {}
        self._open = contextlib.ExitStack()  # everything that close() must release

    # ------------------------------------------------------------------ one iteration

    def iteration(self, trainer: Trainer) -> None:
        """One optimizer step, with the parts shown in the module's picture."""
        if not self.buffer:
            if self.publisher.is_due(self.version):
                self.publish()
            responses = self.collector.generate(self.config.staleness.steps_per_phase)
            self.admit(self.collector.judge(responses), trainer)
        minibatch = self.take()
        outcome = self.train(trainer, minibatch)
        self.settle(minibatch, outcome)
        if self._evaluation_is_due():
            self.evaluate()
        self.log(minibatch, outcome)

    def publish(self) -> None:
        """Send the engine the current version's weights."""
        with self.journal.timer("sync"):
            self.publisher.publish(self.version)

    def admit(self, phase: RolloutPhase, trainer: Trainer) -> None:
        """Buffer a phase's usable trajectories and count the others; write samples; verify log-probs."""
        self._count(phase)
        if self.config.rollout.router_replay == "training":
            phase.minibatches = self._with_trainer_routes(phase.minibatches, trainer)
        refused = self.buffer.add(phase.minibatches)
        self.journal.count("refused_unfit", len(refused))
        self._tell(refused)
        self._write_out(phase.trajectories)
        if self.publisher.needs_proof(self.version):
            with self.journal.timer("sync"):
                self._prove(phase, trainer)

    def take(self) -> Minibatch:
        """The trajectories of the next step."""
        phases.enter("take a minibatch")
        minibatch = self.buffer.take(self.version)
        self.journal.count("refused_stale", len(minibatch.refused))
        self._tell(minibatch.refused)
        return minibatch

    def put_back(self, minibatch: Minibatch) -> None:
        """Return a minibatch to the head of the buffer; the version has not advanced, so nothing has aged."""
        self.buffer.put_back(minibatch)

    def evaluate(self) -> None:
        """Measure the held-out reward of the current version, publishing it first if need be."""
        if self.engine.version != self.version:
            self.publish()
        assert self.inputs.eval_environment is not None
        phases.enter("evaluate")
        with self.journal.timer("eval"):
            result = evaluate(
                engine=self.engine,
                environment=self.inputs.eval_environment,
                rewards=self._rewards["eval"],
                tokenizer=self.inputs.tokenizer,
                decode=self.inputs.decode,
                config=self.config.rollout,
                seed=EVALUATION_SEED,
                place=self.place,
                device=self.device,
            )
        self.journal.add(result.metrics())

    def _tell(self, refused: Sequence[Refusal]) -> None:
        for refusal in refused[:_SHOWN_REFUSALS]:
            log_single_rank(logger, logging.WARNING, f"refused {refusal.sentence}")

    def _evaluation_is_due(self) -> bool:
        done, interval = self.args.curr_iteration + 1, self.config.rollout.eval_interval
        return bool(interval) and (done % interval == 0 or done == self.args.train_iters)

    # ------------------------------------------------------------------ parts of admit()

    def _count(self, phase: RolloutPhase) -> None:
        for name, seconds in phase.seconds.items():
            self.journal.add_seconds(name, seconds)
        self.journal.count("rejected_rewards", phase.rejected)
        for kind, number in phase.rejected_by_kind.items():
            if number:
                self.journal.count(f"rejected_{kind}", number)
        self.journal.counters["skipped_prompts"] = float(self.sampler.skipped)

    def _with_trainer_routes(self, minibatches: list[list[Trajectory]], trainer: Trainer) -> list[list[Trajectory]]:
        phases.enter("record routes")
        with self.journal.timer("record_routes"):
            return with_trainer_routes(
                minibatches,
                step=trainer.step,
                model=trainer.model,
                forward_backward=trainer.forward_backward,
                num_experts=int(self.args.num_experts),
                device=self.device,
            )

    def _write_out(self, trajectories: Sequence[Trajectory]) -> None:
        rollout, version = self.config.rollout, self.engine.version
        assert version is not None
        if self._samples is not None:
            self._samples.append(trajectories[: rollout.save_trajectories], version=version)
        if rollout.save_batch and self.args.rank == 0:
            origin = Origin(
                version=version,
                temperature=rollout.temperature,
                engine_dtype=rollout.engine_dtype_of(self.args.params_dtype),
                trainer_dtype=str(self.args.params_dtype).removeprefix("torch."),
                router_replay=rollout.router_replay,
                quantized=rollout.engine_quantization is not None,
            )
            save_batch(batch_path(self.run_dir, version), trajectories[: rollout.save_batch], origin)

    def _prove(self, phase: RolloutPhase, trainer: Trainer) -> None:
        if self.publisher.prove(phase.trajectories, trainer) and self.config.rollout.router_replay == "rollout":
            self.journal.add(
                mismatch_with_and_without(
                    phase.minibatches[0],
                    step=trainer.step,
                    model=trainer.model,
                    forward_backward=trainer.forward_backward,
                    device=self.device,
                )
            )

    # ------------------------------------------------------------------ start and end

    def start(self, *, model: list[Any], optimizer: Any) -> None:
        """Build the engine, publish the first weights, and evaluate them if the run is new."""
        super().start(model=model, optimizer=optimizer)
        rollout = self.config.rollout
        ends = describe_stops(rollout, self.inputs.tokenizer)
        log_single_rank(logger, logging.INFO, f"a response ends at {ends}")
        self._samples = assembly.open_samples(
            self.args, self.config, self.inputs, self.run_dir, next_group=self.sampler.drawn
        )
        splits: tuple[Literal["train", "eval"], ...] = ("train", "eval") if rollout.eval_interval else ("train",)
        for split in splits:
            self._rewards[split] = self._reward_pool(split) if self.place.leader else None
        self.engine = assembly.build_engine(self.args, self.config, self.inputs, self.run_dir, model)
        self._open.callback(self.engine.shutdown)
        self.publisher = assembly.build_publisher(
            self.args, self.config, self.inputs, self.groups, model, optimizer, self.engine
        )
        self.collector = RolloutCollector(
            engine=self.engine,
            sampler=self.sampler,
            rewards=self._rewards["train"],
            decode=self.inputs.decode,
            config=rollout,
            place=self.place,
            device=self.device,
        )
        self.publish()
        if rollout.eval_interval and self.args.iteration == 0:
            self.evaluate()
            self.journal.write({"iteration": 0, "train_iters": int(self.args.train_iters)})

    def _reward_pool(self, split: Literal["train", "eval"]) -> RewardPool:
        pool = assembly.reward_pool(self.config, split)
        self._open.callback(pool.close)
        return pool

    def close(self) -> None:
        """End the reward processes and the engine."""
        self._open.close()

    # ------------------------------------------------------------------ state

    def state_dict(self) -> dict[str, Any]:
        """Version, counters, the prompts' cursor and the waiting trajectories."""
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
        """Load a saved state. The engine has no weights yet, so a publication comes first.

        Raises:
            ConfigError: the state is of another task, so its waiting trajectories were judged by other rewards.
        """
        if state["task"] != self._task:
            raise ConfigError(
                f"The checkpoint's rollouts are of the task {state['task']!r}, this run's of {self._task!r}: give the "
                "same --rollout-environment flags, or --finetune to start a new run from its weights."
            )
        super().load_state_dict(state)
        self.sampler.load_state_dict(state["sampler"])
        self.buffer.load_state_dict(state["buffer"])
