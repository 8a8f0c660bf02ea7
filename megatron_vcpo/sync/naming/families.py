"""The tables. A family is the list of its rules; the blocks below are shared by the families that use them."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_vcpo.sync.naming.rules import Kind, ParameterSpec, Rule
from megatron_vcpo.sync.naming.shape import ModelShape, NamingError

EMBEDDING = "embedding.word_embeddings.weight"
OUTPUT_LAYER = "output_layer.weight"
_MEGATRON = "decoder.layers.{layer}."
_HF = "model.layers.{layer}."


def _layer_rule(kind: Kind, megatron: str, *hf: tuple[str, str]) -> Rule:
    return Rule(kind, _MEGATRON + megatron, tuple((_HF + name, sizes) for name, sizes in hf))


_EMBEDDING = Rule(Kind.VOCAB, EMBEDDING, (("model.embed_tokens.weight", "vocab hidden"),))
_FINAL_NORM = Rule(Kind.REPLICATED, "decoder.final_layernorm.weight", (("model.norm.weight", "hidden"),))
_LM_HEAD = Rule(Kind.VOCAB, OUTPUT_LAYER, (("lm_head.weight", "vocab hidden"),))

_ATTENTION = (
    _layer_rule(Kind.REPLICATED, "input_layernorm.weight", ("input_layernorm.weight", "hidden")),
    _layer_rule(
        Kind.QKV,
        "self_attention.linear_qkv.weight",
        ("self_attn.q_proj.weight", "query hidden"),
        ("self_attn.k_proj.weight", "kv hidden"),
        ("self_attn.v_proj.weight", "kv hidden"),
    ),
    _layer_rule(Kind.ROW, "self_attention.linear_proj.weight", ("self_attn.o_proj.weight", "hidden query")),
    _layer_rule(Kind.REPLICATED, "pre_mlp_layernorm.weight", ("post_attention_layernorm.weight", "hidden")),
)
_QKV_BIAS = (
    _layer_rule(
        Kind.QKV,
        "self_attention.linear_qkv.bias",
        ("self_attn.q_proj.bias", "query"),
        ("self_attn.k_proj.bias", "kv"),
        ("self_attn.v_proj.bias", "kv"),
    ),
)
_QK_NORM = (
    _layer_rule(Kind.REPLICATED, "self_attention.q_layernorm.weight", ("self_attn.q_norm.weight", "head")),
    _layer_rule(Kind.REPLICATED, "self_attention.k_layernorm.weight", ("self_attn.k_norm.weight", "head")),
)
_MLP = (
    _layer_rule(
        Kind.GATE_UP,
        "mlp.linear_fc1.weight",
        ("mlp.gate_proj.weight", "ffn hidden"),
        ("mlp.up_proj.weight", "ffn hidden"),
    ),
    _layer_rule(Kind.ROW, "mlp.linear_fc2.weight", ("mlp.down_proj.weight", "hidden ffn")),
)
_ROUTER = (_layer_rule(Kind.REPLICATED, "mlp.router.weight", ("mlp.gate.weight", "experts hidden")),)
_EXPERT = (
    _layer_rule(
        Kind.GATE_UP,
        "mlp.experts.local_experts.{expert}.linear_fc1.weight",
        ("mlp.experts.{expert}.gate_proj.weight", "moe_ffn hidden"),
        ("mlp.experts.{expert}.up_proj.weight", "moe_ffn hidden"),
    ),
    _layer_rule(
        Kind.ROW,
        "mlp.experts.local_experts.{expert}.linear_fc2.weight",
        ("mlp.experts.{expert}.down_proj.weight", "hidden moe_ffn"),
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One model family: its names in Hugging Face transformers and its table."""

    name: str  # transformers' model_type
    architecture: str  # transformers' class
    attention: tuple[Rule, ...] = _ATTENTION  # every layer
    mlp: tuple[Rule, ...] = _MLP  # every layer without experts
    router: tuple[Rule, ...] = ()  # every layer with experts
    expert: tuple[Rule, ...] = ()  # every expert of such a layer
    before: tuple[Rule, ...] = (_EMBEDDING,)
    after: tuple[Rule, ...] = (_FINAL_NORM,)
    head: tuple[Rule, ...] = (_LM_HEAD,)  # left out where the embeddings are tied

    def parameters(self, shape: ModelShape) -> list[ParameterSpec]:
        """Every parameter of the whole model, in the one order in which it is streamed. NamingError on a misfit."""
        if any(shape.moe_layers) and not self.expert:
            raise NamingError(f"The {self.name} family has no experts, but the model does (--num-experts).")
        specs = [rule.expand(shape) for rule in self.before]
        for layer in range(shape.num_layers):
            specs += [rule.expand(shape, layer) for rule in self.attention]
            if not shape.is_moe_layer(layer):
                specs += [rule.expand(shape, layer) for rule in self.mlp]
                continue
            specs += [rule.expand(shape, layer) for rule in self.router]
            specs += [rule.expand(shape, layer, e) for e in range(shape.num_experts) for rule in self.expert]
        specs += [rule.expand(shape) for rule in self.after]
        if not shape.tied_embeddings:
            specs += [rule.expand(shape) for rule in self.head]
        return specs


FAMILIES: tuple[Family, ...] = (
    Family(name="llama", architecture="LlamaForCausalLM"),
    Family(name="qwen2", architecture="Qwen2ForCausalLM", attention=_ATTENTION + _QKV_BIAS),
    Family(name="qwen3", architecture="Qwen3ForCausalLM", attention=_ATTENTION + _QK_NORM),
    Family(
        name="qwen3_moe",
        architecture="Qwen3MoeForCausalLM",
        attention=_ATTENTION + _QK_NORM,
        router=_ROUTER,
        expert=_EXPERT,
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
