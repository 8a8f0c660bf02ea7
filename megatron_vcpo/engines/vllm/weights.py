"""New weights for a running in-process vLLM engine.

The first set goes through vLLM's only correct update path: `worker.reload_weights(weights_iterator=...)` puts each
layer back into checkpoint layout, loads it, processes it as at the first load and copies the result into the storage
that the kernels (and CUDA graphs) use. (`model.load_weights` alone is silently wrong for layers whose layout changes
after loading.) We record where every element went and check that against the bits; later sets are copied there directly
(plan.py). Layers that cannot be copied still go through vLLM's reload, one by one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from megatron_vcpo.data.digests import digest
from megatron_vcpo.engines.protocol import EngineError
from megatron_vcpo.engines.vllm.audit import WeightAudit
from megatron_vcpo.engines.vllm.plan import CopyPlan
from megatron_vcpo.engines.vllm.recorder import CopyRecorder
from megatron_vcpo.patches import vllm_cpu_moe_reload, vllm_cpu_tied_head
from megatron_vcpo.sync.receiver import UpdateReport

_FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


class WeightLoader:
    """Loads complete sets of weights into the model of one engine, and checks that they are complete.

    The first set proves that every parameter gets written: old values are overwritten with NaN beforehand, of which
    none may be left, and vLLM's count of loaded elements is read after the last tensor. Later sets must have the same
    names.
    """

    def __init__(self, llm: Any) -> None:
        self._llm = llm
        self._names: frozenset[str] | None = None  # names of the first complete set
        self._plan: CopyPlan | None = None
        self._proven = False  # an update by the plan has been compared with what was sent

    def float32_names(self) -> frozenset[str]:
        """Names of the model's float32 parameters, in vLLM's spelling; for routers that is the checkpoint's."""
        model = self._on_model(_itself)
        return frozenset(name for name, value in model.named_parameters() if value.dtype == torch.float32)

    def load(self, weights: Iterator[tuple[str, torch.Tensor]], *, verify: bool = False) -> UpdateReport:
        """Replace all weights. Raises EngineError naming the tensor; the engine can take another set afterwards.

        With `verify`, old values are overwritten first, and what the engine then holds is compared with what arrived.
        The first set that is copied is always verified.
        """
        if self._plan is not None and self._plan.is_stale:
            self._plan, self._proven = None, False
        plan = self._plan if self._plan is not None and self._plan.reason is None else None
        spoil = verify or self._names is None or (plan is not None and not self._proven)
        feed = _Feed(weights, refuse_nan=self._names is None, digests={} if verify else None)
        recorder = CopyRecorder(self._on_model(_itself)) if self._plan is None else None
        audit = WeightAudit(plan) if plan is not None and spoil else None
        incomplete: list[str] = []
        try:
            if plan is not None:
                self._load_by_plan(plan, feed, audit, incomplete)
            else:
                self._load_by_vllm(feed, recorder, incomplete, spoil=spoil)
        except Exception as error:
            self._on_model(_abandon_reload)
            raise self._explained(error, feed) from error
        if not feed.exhausted:
            feed.drain()
            raise EngineError(f"A weight update failed: vLLM stopped reading after tensor {feed.last}.")
        if spoil:
            incomplete.extend(name for name in self._on_model(_parameters_with_nan) if name not in incomplete)
        self._check_complete(frozenset(feed.names), incomplete, audit)
        if recorder is not None:
            self._plan = CopyPlan(self._on_model(_itself), recorder.written, recorder.shapes)
        assert self._plan is not None
        reloaded = len(self._plan.reloaded if plan is not None else feed.names)
        return UpdateReport(
            copied=len(feed.names) - reloaded,
            reloaded=reloaded,
            received=feed.digests,
            unreadable=tuple(self._plan.reloaded),
        )

    def _load_by_vllm(self, feed: _Feed, recorder: CopyRecorder | None, incomplete: list[str], *, spoil: bool) -> None:
        """Load through vLLM's own reload of the whole model."""
        if spoil:
            self._on_model(_fill_with_nan)
        self._on_model(_before_reload)

        def tensors() -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in feed:
                yield name, _own(tensor, name, recorder)
            incomplete.extend(self._on_model(_not_loaded))

        with _uninitialized_memory_is_nan(spoil), recorder or contextlib.nullcontext():
            self._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": tensors()})
        self._on_model(_after_reload)

    def _load_by_plan(self, plan: CopyPlan, feed: _Feed, audit: WeightAudit | None, incomplete: list[str]) -> None:
        """Copy directly to where the first set went; vLLM reloads the layers that the plan cannot copy."""
        self._on_model(_before_reload)
        if audit is not None:
            for layer in plan.reloaded_layers:
                _fill_with_nan(layer, None)
            audit.scramble()
        plan.begin()
        through_loader = frozenset(plan.reloaded)

        def others() -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in feed:
                if audit is not None:
                    audit.note(name, tensor)
                if name in through_loader or name not in plan.routes:
                    yield name, _own(tensor, name, None)
                elif (layer := plan.write(name, tensor)) is not None:
                    if audit is not None:
                        audit.packing(layer)
                    plan.pack(layer)
            incomplete.extend(self._on_model(_not_loaded))

        with _uninitialized_memory_is_nan(audit is not None):
            self._on_model(lambda model, config: _reload_layers(model, config, plan.reloaded_layers, others()))
        incomplete.extend(plan.unwritten())
        self._on_model(_after_reload)

    def _explained(self, error: Exception, feed: _Feed) -> EngineError:
        if feed.producer_failed:
            reason = "the trainer could not produce the next one"
        else:
            feed.drain()  # other ranks may be waiting in the producer's collectives
            reason = "vLLM could not load it"
        where = feed.last or "(none yet)"
        return EngineError(f"A weight update failed at tensor {where}: {reason}: {type(error).__name__}: {error}")

    def _check_complete(self, names: frozenset[str], incomplete: list[str], audit: WeightAudit | None) -> None:
        if incomplete:
            raise EngineError(
                f"After a weight update these engine parameters were not written, or not in full: {_some(incomplete)}; "
                "the trainer must send every tensor of the checkpoint."
            )
        if self._names is None:
            self._names = names
        if names != self._names:
            missing, extra = sorted(self._names - names), sorted(names - self._names)
            raise EngineError(
                f"A weight update differs from the first: missing {_some(missing)}; not expected {_some(extra)}."
            )
        if audit is not None:
            if wrong := audit.wrong():
                raise EngineError(
                    f"After a weight update these engine parameters do not hold what was sent: {_some(wrong)}."
                )
            self._proven = True

    def _on_model(self, function: Callable[[torch.nn.Module, Any], Any]) -> Any:
        return self._llm.collective_rpc(_call_on_model, args=(function,))[0]


class _Feed:
    """The producer's tensors, one by one; remembers how far they got."""

    def __init__(
        self, weights: Iterator[tuple[str, torch.Tensor]], *, refuse_nan: bool, digests: dict[str, int] | None
    ) -> None:
        self._weights = weights
        self._refuse_nan = refuse_nan
        self.digests = digests  # filled unless None
        self.names: set[str] = set()
        self.last: str | None = None
        self.exhausted = False
        self.producer_failed = False

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        while (item := self._next()) is not None:
            name, tensor = item
            self.last = name
            if name in self.names:
                raise ValueError("it came twice")
            self.names.add(name)
            if self._refuse_nan and tensor.dtype in _FLOATS and bool(torch.isnan(tensor).any()):
                raise ValueError("it holds NaN")
            if self.digests is not None:
                self.digests[name] = digest(tensor)
            yield name, tensor.detach()

    def _next(self) -> tuple[str, torch.Tensor] | None:
        try:
            return next(self._weights)
        except StopIteration:
            self.exhausted = True
            return None
        except BaseException:
            self.producer_failed = True
            raise

    def drain(self) -> None:
        """Take the rest from the producer and discard it."""
        for _ in self._weights:
            pass


def _own(tensor: torch.Tensor, name: str, recorder: CopyRecorder | None) -> torch.Tensor:
    """A copy for vLLM, which keeps a fused layer's parts (q, k, v) until the last has arrived, while the producer may
    reuse a tensor's memory as soon as the next one is asked for."""
    copy = tensor.clone(memory_format=torch.contiguous_format)
    if recorder is not None:
        recorder.expect(name, copy)
    return copy


def _call_on_model(worker: Any, function: Callable[[torch.nn.Module, Any], Any]) -> Any:
    from vllm.config import set_current_vllm_config

    with set_current_vllm_config(worker.vllm_config):
        return function(worker.model_runner.get_model(), worker.model_runner.model_config)


def _itself(model: torch.nn.Module, config: Any) -> torch.nn.Module:
    return model


@contextlib.contextmanager
def _uninitialized_memory_is_nan(enabled: bool) -> Iterator[None]:
    """vLLM loads into fresh memory; if that is filled with NaN, elements that were never written show."""
    mode = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    fill = torch.utils.deterministic.fill_uninitialized_memory
    if enabled:
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(mode, warn_only=warn_only)
        torch.utils.deterministic.fill_uninitialized_memory = fill


def _fill_with_nan(model: torch.nn.Module, config: Any) -> None:
    for parameter in model.parameters():
        if parameter.dtype in _FLOATS:
            parameter.data.fill_(torch.nan)


def _parameters_with_nan(model: torch.nn.Module, config: Any) -> list[str]:
    return [n for n, p in model.named_parameters() if p.dtype in _FLOATS and bool(torch.isnan(p.data).any())]


def _not_loaded(model: torch.nn.Module, config: Any) -> list[str]:
    """Parameters that still lack elements, by vLLM's own count, after all tensors have been taken.

    The search for NaN is not enough: CPU kernels keep linear weights in packed form, where NaN is not found, and a
    layer that got nothing silently keeps its old weights.
    """
    from vllm.model_executor.layers.attention import is_deferred_attention_layer
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    waiting: list[tuple[str, set[int]]] = []
    loaded: set[int] = set()
    for name, layer in model.named_modules():
        if is_deferred_attention_layer(layer):
            continue  # latent attention's own parameters are products of others, computed once those have arrived
        info = get_layerwise_info(layer)
        kernel = info.kernel_tensors[0] if info.kernel_tensors else {}
        storages = {parameter.data_ptr() for parameter in kernel.values()}
        # The loader writes the rows that pad the vocabulary but does not count them.
        padded = isinstance(layer, VocabParallelEmbedding) and info.load_numel > 0
        if not kernel or not info.can_load() or padded:
            loaded |= {p.data_ptr() for p in layer.parameters(recurse=False) if not p.is_meta} | storages
        elif info.load_numel < info.load_numel_total:
            waiting.append((name, storages))
    # An output layer tied to the embedding receives no tensor of its own.
    return [f"{name}.*" for name, storages in waiting if not storages <= loaded - {0}]


def _before_reload(model: torch.nn.Module, config: Any) -> None:
    vllm_cpu_moe_reload.forget_packed_experts(model)


def _after_reload(model: torch.nn.Module, config: Any) -> None:
    vllm_cpu_tied_head.repack_tied_heads(model)


@torch.no_grad()
def _reload_layers(
    model: torch.nn.Module,
    config: Any,
    layers: list[torch.nn.Module],
    weights: Iterator[tuple[str, torch.Tensor]],
) -> None:
    """Do what `reload_weights` does, but only for some layers; the iterator `weights` copies everything else itself."""
    from vllm.model_executor.layers.attention import is_deferred_attention_layer
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    for layer in layers:
        initialize_layerwise_reload(layer)
    if layers:
        model.load_weights(weights)
    for _ in weights:
        pass
    for layer in layers:
        finalize_layerwise_reload(layer, config)
    for layer in model.modules():
        # latent attention keeps products of its projections; other layers need nothing
        if is_deferred_attention_layer(layer) and layer not in layers:
            layer.process_weights_after_loading(config.dtype)


def _abandon_reload(model: torch.nn.Module, config: Any) -> None:
    """Undo an incomplete reload; otherwise the next one would count the parts that arrived in this one."""
    from vllm.model_executor.model_loader.reload.layerwise import finalize_layerwise_reload, get_layerwise_info

    for layer in model.modules():
        info = get_layerwise_info(layer)
        if info.can_load():
            info.loaded_weights.clear()
            info.load_numel = 0
    finalize_layerwise_reload(model, config)


def _some(names: list[str]) -> str:
    if not names:
        return "none"
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
