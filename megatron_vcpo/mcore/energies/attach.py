"""Find the rule for every module of a model that has parameters; a parameter without a rule is an error.

An energy pass runs with all parameters frozen, so that no weight gradient is formed and no hook of the data-parallel
wrapper fires. The rules need only the input of a layer and the gradient of its output.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from megatron_vcpo.config import ConfigError
from megatron_vcpo.mcore.energies import experts, rules
from megatron_vcpo.mcore.energies.collector import EnergyCollector
from megatron_vcpo.mcore.energies.transformer_engine import te_rules
from megatron_vcpo.mcore.energies.unsupported import require_supported
from megatron_vcpo.mcore.reference import without_parameter_gather

Rule = Callable[[EnergyCollector, str, Any, rules.Undo], None]


def rule_table() -> list[tuple[type, Rule, tuple[str, ...]]]:
    """(type of module, its rule, the parameters that the rule covers); the first entry that matches applies."""
    import torch
    from megatron.core.fusions.fused_layer_norm import FusedLayerNorm
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
    from megatron.core.transformer.moe.moe_layer import MoELayer
    from megatron.core.transformer.moe.router import TopKRouter
    from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
    from megatron.core.transformer.transformer_layer import TransformerLayer

    both = ("weight", "bias")
    return [
        *te_rules(),
        (ColumnParallelLinear, rules.linear, both),
        (RowParallelLinear, rules.linear, both),
        (VocabParallelEmbedding, rules.embedding, ("weight",)),
        (torch.nn.RMSNorm, rules.norm, ("weight",)),
        (torch.nn.LayerNorm, rules.norm, both),
        (FusedLayerNorm, rules.norm, both),
        (TopKRouter, rules.router, both),
        (SharedExpertMLP, rules.shared_expert_gate, ("gate_weight",)),
        (MoELayer, experts.moe_layer, ()),
        (TransformerLayer, rules.layer_scope, ()),
    ]


class Attachment:
    """The rules of one model; built once, so that an unsupported model is refused before anything runs."""

    def __init__(self, model: list[Any]) -> None:
        """Raises ConfigError, on this rank alone, for a trainable parameter or a setting without a rule.

        Args:
            model: Megatron's list of model chunks.
        """
        from megatron.core.utils import get_model_config

        require_supported(get_model_config(model[0]))
        named = [(name, p) for chunk in model for name, p in chunk.named_parameters() if p.requires_grad]
        self.model = model
        self.parameters = [parameter for _, parameter in named]
        self.trainable = frozenset(map(id, self.parameters))
        self.tied = any(getattr(m, "share_embeddings_and_output_weights", False) for c in model for m in c.modules())
        self.has_experts = any(hasattr(m, "token_dispatcher") for c in model for m in c.modules())
        self._uses: list[tuple[Rule, str, Any]] = []
        covered: set[int] = set()
        table = rule_table()
        for chunk in model:
            for name, module in chunk.named_modules():
                for kind, rule, parameters in table:
                    if isinstance(module, kind):
                        self._uses.append((rule, name, module))
                        covered |= {id(getattr(module, parameter, None)) for parameter in parameters}
                        break
        missing = [name for name, parameter in named if id(parameter) not in covered]
        if missing:
            raise ConfigError(
                f"--vcpo-energy exact has no rule for the parameters {', '.join(missing[:4])}"
                f"{' and others' if len(missing) > 4 else ''}; choose --vcpo-energy logit."
            )

    @contextmanager
    def active(self, collector: EnergyCollector) -> Iterator[None]:
        """Freeze all parameters and report every use of them to the collector."""
        undo: rules.Undo = []
        with without_parameter_gather(self.model):  # its hooks expect trainable parameters
            for parameter in self.parameters:
                parameter.requires_grad_(False)
            try:
                for rule, name, module in self._uses:
                    rule(collector, name, module, undo)
                yield
            finally:
                for restore in reversed(undo):
                    restore()
                for parameter in self.parameters:
                    parameter.requires_grad_(True)
