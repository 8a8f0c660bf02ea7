"""The table of each family: a list of rules from blocks.py."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_vcpo.models.naming.blocks import (
    ATTENTION,
    EMBEDDING,
    EXPERT,
    FINAL_NORM,
    GPT_OSS_ATTENTION,
    GPT_OSS_EXPERT,
    GPT_OSS_ROUTER,
    LATENT_ATTENTION,
    LM_HEAD,
    MIXTRAL_EXPERT,
    MIXTRAL_ROUTER,
    MLP,
    OUTPUT_LAYER,
    QK_NORM,
    QKV_BIAS,
    ROUTER,
    ROUTER_BIAS,
    SHARED_EXPERT,
    WORD_EMBEDDING,
)
from megatron_vcpo.models.naming.rules import ParameterSpec, Rule
from megatron_vcpo.models.naming.shape import ModelShape, NamingError

__all__ = ["EMBEDDING", "FAMILIES", "OUTPUT_LAYER", "Family", "family_by_name", "family_for_architecture"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One model family: its names in Hugging Face transformers and its table."""

    name: str  # transformers' model_type
    architecture: str  # transformers' class
    attention: tuple[Rule, ...] = ATTENTION  # every layer
    mlp: tuple[Rule, ...] = MLP  # every layer without experts
    router: tuple[Rule, ...] = ()  # every layer with experts
    expert: tuple[Rule, ...] = ()  # every expert of such a layer
    before: tuple[Rule, ...] = (WORD_EMBEDDING,)
    after: tuple[Rule, ...] = (FINAL_NORM,)
    head: tuple[Rule, ...] = (LM_HEAD,)  # left out if the embeddings are tied
    latent: bool = False  # multi-latent attention
    joined_experts: bool = False  # one Hugging Face tensor holds all experts of a layer, whose parts then come in a row

    def parameters(self, shape: ModelShape) -> list[ParameterSpec]:
        """Every parameter of the whole model, in the order in which they are streamed. NamingError if the sizes do not
        suit the family."""
        self._check(shape)
        specs = _expand(self.before, shape)
        for layer in range(shape.num_layers):
            specs += _expand(self.attention, shape, layer)
            if not shape.is_moe_layer(layer):
                specs += _expand(self.mlp, shape, layer)
                continue
            specs += _expand(self.router, shape, layer)
            if self.joined_experts:
                for rule in self.expert:
                    specs += [rule.expand(shape, layer, expert) for expert in range(shape.num_experts)]
                continue
            for expert in range(shape.num_experts):
                specs += _expand(self.expert, shape, layer, expert)
        specs += _expand(self.after, shape)
        if not shape.tied_embeddings:
            specs += _expand(self.head, shape)
        return specs

    def _check(self, shape: ModelShape) -> None:
        if any(shape.moe_layers) and not self.expert:
            raise NamingError(f"The {self.name} family has no experts, but the model does (--num-experts).")
        if self.latent and shape.latent is None:
            raise NamingError(f"The {self.name} family needs --multi-latent-attention.")
        if shape.latent is not None and not self.latent:
            raise NamingError(f"The {self.name} family has no latents, but the model does (--multi-latent-attention).")


def _expand(
    rules: tuple[Rule, ...], shape: ModelShape, layer: int | None = None, expert: int | None = None
) -> list[ParameterSpec]:
    return [rule.expand(shape, layer, expert) for rule in rules if rule.applies(shape)]


FAMILIES: tuple[Family, ...] = (
    Family(name="llama", architecture="LlamaForCausalLM"),
    Family(name="qwen2", architecture="Qwen2ForCausalLM", attention=ATTENTION + QKV_BIAS),
    Family(name="qwen3", architecture="Qwen3ForCausalLM", attention=ATTENTION + QK_NORM),
    Family(
        name="qwen3_moe",
        architecture="Qwen3MoeForCausalLM",
        attention=ATTENTION + QK_NORM,
        router=ROUTER,
        expert=EXPERT,
    ),
    Family(name="mixtral", architecture="MixtralForCausalLM", router=MIXTRAL_ROUTER, expert=MIXTRAL_EXPERT),
    Family(
        name="deepseek_v2",
        architecture="DeepseekV2ForCausalLM",
        attention=LATENT_ATTENTION,
        router=ROUTER + SHARED_EXPERT,
        expert=EXPERT,
        latent=True,
    ),
    Family(
        name="deepseek_v3",
        architecture="DeepseekV3ForCausalLM",
        attention=LATENT_ATTENTION,
        router=ROUTER + ROUTER_BIAS + SHARED_EXPERT,
        expert=EXPERT,
        latent=True,
    ),
    Family(
        name="gpt_oss",
        architecture="GptOssForCausalLM",
        attention=GPT_OSS_ATTENTION,
        router=GPT_OSS_ROUTER,
        expert=GPT_OSS_EXPERT,
        joined_experts=True,
    ),
)


def family_by_name(name: str) -> Family:
    """The family called `name` (transformers' model_type); NamingError lists the known ones."""
    for family in FAMILIES:
        if family.name == name:
            return family
    raise NamingError(f"No table for the model family {name!r}; known: {', '.join(f.name for f in FAMILIES)}.")


def family_for_architecture(architecture: str) -> Family:
    """The family of a transformers class such as 'LlamaForCausalLM'; NamingError lists the known ones."""
    for family in FAMILIES:
        if family.architecture == architecture:
            return family
    known = ", ".join(f.architecture for f in FAMILIES)
    raise NamingError(f"No table for the architecture {architecture!r}; known: {known}.")
