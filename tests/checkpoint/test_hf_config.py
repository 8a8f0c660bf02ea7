"""config.json <-> Megatron's settings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from megatron_vcpo.checkpoint.hf_config import (
    check_config_matches,
    hf_config_from_megatron,
    megatron_flags_for,
    write_model_dir,
)
from megatron_vcpo.checkpoint.model_files import read_model_folder
from megatron_vcpo.models.building.rotary import check_rotary, rotary_frequencies, yarn_scales
from megatron_vcpo.models.description import ModelFacts, describe_hf, describe_megatron
from megatron_vcpo.models.description.hf import check_engine_reads
from megatron_vcpo.models.errors import CheckpointError
from tests.oracle.model_pairs import ALL_FAMILIES, VOCAB, gpt_models, save_hf_model, transformer_config

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
    "rope_theta": 5000.0,
}


V3_ROPE = {
    "rope_type": "yarn",
    "factor": 4.0,
    "mscale": 0.7,
    "mscale_all_dim": 1.3,
    "original_max_position_embeddings": 4096,
    "rope_theta": 5000.0,
}
LONG = {"qk_pos_emb_head_dim": 64}  # enough dimensions for YaRN to slow some down


def position(name: str) -> dict[str, Any]:
    """What GPT-OSS has of its own."""
    return {"position_embedding_type": "yarn"} if name == "gpt_oss" else {}


def facts(**changes: Any) -> ModelFacts:
    fields: dict[str, Any] = {
        "vocab_size": VOCAB,
        "max_position_embeddings": 128,
        "rotary_base": 5000,
        "tied_embeddings": True,
    }
    return ModelFacts(**(fields | changes))


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("name", ALL_FAMILIES)
def test_a_written_config_describes_the_model_it_was_written_from(name: str, tied: bool, tmp_path: Path) -> None:
    config, about = transformer_config(name), facts(tied_embeddings=tied, **position(name))
    fields = hf_config_from_megatron(config, about, dtype=torch.bfloat16)
    (tmp_path / "config.json").write_text(json.dumps(fields))
    assert describe_hf(tmp_path) == describe_megatron(config, about)
    loaded = AutoConfig.from_pretrained(tmp_path)
    assert loaded.dtype == torch.bfloat16
    model = AutoModelForCausalLM.from_config(loaded)
    assert type(model).__name__ == fields["architectures"][0]
    check_config_matches(tmp_path, config, about)


@pytest.mark.parametrize("name", ALL_FAMILIES)
def test_a_config_that_transformers_wrote_matches_the_same_model_in_megatron(name: str, tmp_path: Path) -> None:
    save_hf_model(tmp_path, name, tied=True)
    assert check_config_matches(tmp_path, transformer_config(name), facts(**position(name))).family.name == name


def test_every_field_that_disagrees_is_listed_with_its_flag(tmp_path: Path) -> None:
    save_hf_model(tmp_path, "qwen2", tied=False)
    config = transformer_config("llama", num_layers=3, ffn_hidden_size=64, layernorm_epsilon=1e-6, num_query_groups=4)
    with pytest.raises(CheckpointError) as caught:
        check_config_matches(tmp_path, config, facts(vocab_size=99, rotary_base=10000, rope_scaling_factor=8.0))
    message = str(caught.value)
    for flag in (
        "--add-qkv-bias",
        "--num-layers 2",
        "--ffn-hidden-size 48",
        "--norm-epsilon 1e-05",
        "--num-query-groups 2",
        "--vocab-size 101",
        "--rotary-base 5000",
        "remove --use-rope-scaling",
        "--untie-embeddings-and-output-weights",
    ):
        assert flag in message
    assert "--hidden-size" not in message
    assert "max_position_embeddings" not in message


def test_the_order_of_router_softmax_and_top_k_is_compared(tmp_path: Path) -> None:
    save_hf_model(tmp_path, "qwen3_moe", tied=True)
    with pytest.raises(CheckpointError, match="remove --moe-router-pre-softmax"):
        check_config_matches(tmp_path, transformer_config("qwen3_moe", moe_router_pre_softmax=True), facts())


def test_a_megatron_model_of_no_family_is_refused_with_every_flag_to_change() -> None:
    config = transformer_config("llama", normalization="LayerNorm", gated_linear_unit=False, add_bias_linear=True)
    with pytest.raises(CheckpointError) as caught:
        describe_megatron(config, facts(position_embedding_type="learned_absolute"))
    for flag in ("--normalization RMSNorm", "--swiglu", "--disable-bias-linear", "--position-embedding-type rope"):
        assert flag in str(caught.value)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"hidden_act": "gelu"}, "hidden_act gelu"),
        ({"attention_bias": True}, "attention_bias"),
        ({"rope_parameters": {**LLAMA3, "high_freq_factor": 2.0}}, "high_freq_factor"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5000.0}}, "rope_type linear"),
        ({"model_type": "gpt2"}, "gpt2"),
    ],
)
def test_what_megatron_would_compute_differently_is_refused(change: dict[str, Any], named: str, tmp_path: Path) -> None:
    save_hf_model(tmp_path, "llama", tied=True)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(CheckpointError, match=named):
        describe_hf(tmp_path)


DEEPSEEK_FOREIGN: list[tuple[str, dict[str, Any], str]] = [
    ("mixtral", {"sliding_window": 64}, "sliding_window"),
    ("deepseek_v2", {"topk_method": "group_limited_greedy", "n_group": 2, "topk_group": 1}, "group_limited_greedy"),
    ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob"),
    ("deepseek_v2", {"scoring_func": "sigmoid"}, "scoring_func sigmoid"),
    ("deepseek_v2", {"moe_layer_freq": 2}, "moe_layer_freq 2"),
    ("deepseek_v2", {"first_k_dense_replace": 2}, "no layer with experts"),
    ("deepseek_v3", {"topk_group": 4}, "topk_group"),
    ("deepseek_v3", {"norm_topk_prob": False}, "norm_topk_prob false"),
    ("deepseek_v3", {"rope_interleave": False}, "rope_interleave false"),
    ("deepseek_v3", {"topk_method": "greedy"}, "topk_method greedy"),
    ("deepseek_v3", {"attention_bias": True}, "attention_bias"),
    ("deepseek_v3", {"rope_parameters": LLAMA3}, "rope_type llama3"),
    ("gpt_oss", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
    ("gpt_oss", {"swiglu_alpha": 1.5}, "swiglu_alpha 1.5"),
    ("gpt_oss", {"attention_bias": False}, "attention_bias false"),
    ("gpt_oss", {"rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}}, "rope_type default"),
]
for _key, _value in {
    "original_max_position_embeddings": 8192,
    "beta_fast": 16,
    "truncate": False,
    "attention_factor": 1.0,
    "mscale": 0.0,
}.items():
    DEEPSEEK_FOREIGN.append(("deepseek_v3", {"rope_parameters": {**V3_ROPE, _key: _value}}, _key))


@pytest.mark.parametrize(("name", "change", "named"), DEEPSEEK_FOREIGN)
def test_routings_and_scalings_that_megatron_lacks_are_refused(
    name: str, change: dict[str, Any], named: str, tmp_path: Path
) -> None:
    save_hf_model(tmp_path, name, tied=False)
    describe_hf(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(CheckpointError, match=named):
        describe_hf(tmp_path)


@pytest.mark.parametrize(
    ("name", "change", "named"),
    [
        ("mixtral", {"moe_layer_freq": [0, 1]}, "--moe-layer-freq 1"),
        ("mixtral", {"moe_router_pre_softmax": True}, "no --moe-router-pre-softmax"),
        ("mixtral", {"moe_shared_expert_intermediate_size": 8}, "no --moe-shared-expert-intermediate-size"),
        ("mixtral", {"moe_router_topk_scaling_factor": 2.0}, "no --moe-router-topk-scaling-factor"),
        ("deepseek_v2", {"moe_router_pre_softmax": False}, "--moe-router-pre-softmax"),
        ("deepseek_v2", {"moe_layer_freq": [1, 0]}, "layers without experts first"),
        ("deepseek_v2", {"moe_layer_freq": 2}, "layers without experts first"),
        ("deepseek_v2", {"moe_router_num_groups": 2, "moe_router_group_topk": 1}, "--moe-router-topk / 1"),
        ("deepseek_v2", {"qk_layernorm": False}, "--qk-layernorm"),
        ("deepseek_v2", {"mscale_all_dim": 1.0}, "no --mscale-all-dim"),
        ("deepseek_v3", {"moe_router_group_topk": 1}, "--moe-router-topk / 2"),
        ("deepseek_v3", {"moe_router_enable_expert_bias": False}, "--moe-router-enable-expert-bias"),
        ("deepseek_v3", {"moe_shared_expert_intermediate_size": None}, "--moe-shared-expert-intermediate-size"),
        ("deepseek_v3", {"moe_shared_expert_intermediate_size": 25}, "a multiple of --moe-ffn-hidden-size"),
        ("deepseek_v3", {"beta_fast": 16}, "beta_fast 32"),
        ("deepseek_v3", {"mscale_all_dim": 0.0}, "--mscale 1.0"),
        ("deepseek_v3", {"mtp_num_layers": 1}, "--mtp-num-layers"),
        ("deepseek_v3", {"mla_down_proj_fusion": True}, "--mla-down-proj-fusion"),
        ("gpt_oss", {"window_attn_skip_freq": 1}, "--window-attn-skip-freq 2"),
        ("gpt_oss", {"window_size": None}, "--window-size N,0"),
        ("gpt_oss", {"glu_linear_offset": 0.0}, "--glu-linear-offset 1.0"),
        ("gpt_oss", {"activation_func_clamp_value": None}, "--activation-func-clamp-value"),
        ("gpt_oss", {"moe_router_pre_softmax": True}, "no --moe-router-pre-softmax"),
        ("gpt_oss", {"softmax_type": "vanilla"}, "--disable-bias-linear"),
    ],
)
def test_megatron_models_that_no_config_can_describe_are_refused(name: str, change: dict[str, Any], named: str) -> None:
    about = facts(tied_embeddings=False, **position(name))
    describe_megatron(transformer_config(name), about)
    with pytest.raises(CheckpointError) as caught:
        describe_megatron(transformer_config(name, **change), about)
    assert named in str(caught.value)


@pytest.mark.parametrize(
    ("name", "lacking"),
    [("deepseek_v3", {"topk_method": '"noaux_tc"', "scoring_func": '"sigmoid"'}), ("deepseek_v2", {"n_group": "1"})],
)
def test_what_vllm_reads_and_transformers_does_not_write_is_asked_for(
    name: str, lacking: dict[str, str], tmp_path: Path
) -> None:
    save_hf_model(tmp_path, name, tied=False)
    check_engine_reads(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({k: v for k, v in json.loads(path.read_text()).items() if k not in lacking}))
    with pytest.raises(CheckpointError) as caught:
        check_engine_reads(tmp_path)
    assert all(f'"{key}": {value}' in str(caught.value) for key, value in lacking.items())


def test_fields_of_a_deepseek_that_disagree_are_listed_with_their_flags(tmp_path: Path) -> None:
    save_hf_model(tmp_path, "deepseek_v3", tied=False)
    config = transformer_config(
        "deepseek_v3",
        q_lora_rank=None,
        moe_router_num_groups=2,
        moe_router_topk_scaling_factor=1.0,
        rotary_scaling_factor=40.0,
        moe_layer_freq=1,
        moe_shared_expert_intermediate_size=48,
    )
    with pytest.raises(CheckpointError) as caught:
        check_config_matches(tmp_path, config, facts(tied_embeddings=False))
    for flag in (
        "--q-lora-rank 16 --kv-lora-rank 12 --qk-head-dim 8 --qk-pos-emb-head-dim 4 --v-head-dim 6",
        "--moe-router-num-groups 4 --moe-router-group-topk 2",
        "--moe-router-topk-scaling-factor 2.5",
        "--rotary-scaling-factor 4.0 --mscale 0.7 --mscale-all-dim 1.3",
        "--moe-layer-freq [0,1]",
        "--moe-shared-expert-intermediate-size 24",
    ):
        assert flag in str(caught.value)


def test_yarns_frequencies_and_scales_are_those_of_transformers(tmp_path: Path) -> None:
    sizes = {"qk_rope_head_dim": 64, "rope_parameters": {**V3_ROPE, "factor": 40.0, "rope_theta": 10000.0}}
    model = save_hf_model(tmp_path, "deepseek_v3", tied=False, **sizes)
    about = describe_hf(tmp_path)
    rotary = model.model.rotary_emb
    torch.testing.assert_close(rotary_frequencies(about), rotary.inv_freq.double(), rtol=1e-6, atol=0)
    scale, softmax = yarn_scales(about.yarn)
    assert scale == pytest.approx(rotary.attention_scaling)
    assert softmax / about.head_dim**0.5 == pytest.approx(model.model.layers[0].self_attn.scaling)


@pytest.mark.parametrize(
    "change", [{"rotary_base": 10000}, {"rotary_scaling_factor": 8.0}, {"mscale": 1.0}, {"mscale_all_dim": 1.0}]
)
def test_a_built_latent_attention_with_other_angles_or_scales_is_refused(
    change: dict[str, Any], megatron_groups: Any
) -> None:
    about = facts(tied_embeddings=False)
    right = describe_megatron(transformer_config("deepseek_v3", **LONG), about)
    check_rotary(gpt_models(transformer_config("deepseek_v3", **LONG), tied=False), right)
    with pytest.raises(CheckpointError, match="--rotary-scaling-factor"):
        check_rotary(gpt_models(transformer_config("deepseek_v3", **(LONG | change)), tied=False), right)


def test_a_folder_without_a_config_or_with_a_broken_one_gives_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no checkpoint folder"):
        describe_hf(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        describe_hf(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "lla')
    with pytest.raises(CheckpointError, match="not a model configuration"):
        describe_hf(tmp_path)


def test_older_spellings_of_rope_and_defaults_are_understood(tmp_path: Path) -> None:
    save_hf_model(tmp_path, "llama", tied=True)
    path = tmp_path / "config.json"
    fields = json.loads(path.read_text())
    del fields["rope_parameters"], fields["head_dim"]
    path.write_text(json.dumps(fields | {"rope_theta": 5000.0, "rope_scaling": None}))
    check_config_matches(tmp_path, transformer_config("llama"), facts())


@pytest.mark.parametrize("name", ["deepseek_v3", "gpt_oss"])
def test_the_older_spelling_of_yarn_is_understood(name: str, tmp_path: Path) -> None:
    save_hf_model(tmp_path, name, tied=False)
    path = tmp_path / "config.json"
    fields = json.loads(path.read_text())
    newer, rope = describe_hf(tmp_path), fields.pop("rope_parameters")
    old = {"type" if name == "deepseek_v3" else "rope_type": rope.pop("rope_type")}
    path.write_text(json.dumps(fields | {"rope_theta": rope.pop("rope_theta"), "rope_scaling": rope | old}))
    assert describe_hf(tmp_path) == newer


@pytest.mark.parametrize("name", ALL_FAMILIES)
def test_the_flags_for_a_checkpoint_make_megatron_build_that_model(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rope = {"rope_parameters": LLAMA3, "max_position_embeddings": 16384} if name == "llama" else {}
    changes = {"norm_topk_prob": False} if name == "qwen3_moe" else {}
    save_hf_model(tmp_path, name, tied=name != "qwen3", **rope, **changes)
    transformer_config(name)  # makes Megatron importable
    from megatron.training import arguments
    from megatron.training.argument_utils import core_transformer_config_from_args

    extra = ["--micro-batch-size", "1", "--train-iters", "1", "--lr", "1e-4", "--seq-length", "64"]
    extra += ["--transformer-impl", "local", "--no-rope-fusion", "--no-gradient-accumulation-fusion"]
    extra += ["--no-persist-layer-norm", "--no-masked-softmax-fusion"]
    monkeypatch.setattr("sys.argv", ["train", *megatron_flags_for(tmp_path), *extra])
    args = arguments.parse_args()
    arguments.validate_args(args)
    check_config_matches(tmp_path, core_transformer_config_from_args(args), ModelFacts.from_args(args, args.vocab_size))
    assert args.padded_vocab_size == 128
    assert args.hidden_dropout == args.attention_dropout == 0.0


def test_the_padded_vocabulary_grows_with_tensor_parallelism(tmp_path: Path) -> None:
    save_hf_model(tmp_path, "llama", tied=True)
    flags = megatron_flags_for(tmp_path, tensor_model_parallel_size=2)
    assert flags[-2:] == ["--padded-vocab-size", "256"]


def test_the_engines_folder_holds_config_and_tokenizer_and_nothing_else(tmp_path: Path) -> None:
    tokenizer = tmp_path / "tokenizer"
    tokenizer.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "model.safetensors"):
        (tokenizer / name).write_text("{}")
    (tokenizer / "config.json").write_text('{"model_type": "llama", "eos_token_id": [3, 7], "bos_token_id": null}')
    target = tmp_path / "engine"
    files = read_model_folder(tokenizer)
    write_model_dir(target, transformer_config("llama"), facts(), files, dtype=torch.float32)
    assert {p.name for p in target.iterdir()} == {"config.json", "tokenizer.json", "tokenizer_config.json"}
    config = json.loads((target / "config.json").read_text())
    assert (config["eos_token_id"], config["bos_token_id"], config["pad_token_id"]) == ([3, 7], None, None)
    assert config["hidden_size"] == 32


@pytest.mark.parametrize("factor", [None, 32.0])
def test_rotary_frequencies_are_those_of_transformers(factor: float | None, tmp_path: Path) -> None:
    changes = {"rope_parameters": LLAMA3, "max_position_embeddings": 16384} if factor else {}
    model = save_hf_model(tmp_path, "llama", tied=True, head_dim=64, **changes)
    expected = model.model.rotary_emb.inv_freq.double()
    torch.testing.assert_close(rotary_frequencies(describe_hf(tmp_path)), expected, rtol=1e-6, atol=0)


def test_a_built_model_with_another_scaling_factor_is_refused(megatron_groups: Any) -> None:
    config = transformer_config("llama", kv_channels=64)
    right = describe_megatron(config, facts(rope_scaling_factor=32.0))
    check_rotary(gpt_models(config, tied=True, rope={"rope_scaling": True, "rope_scaling_factor": 32.0}), right)
    for rope in ({"rope_scaling": True}, {}):
        with pytest.raises(CheckpointError, match="--rope-scaling-factor"):
            check_rotary(gpt_models(config, tied=True, rope=rope), right)


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        ("llama", "num_attention_heads", 0),
        ("llama", "hidden_size", None),
        ("llama", "vocab_size", 0),
        ("llama", "num_hidden_layers", -1),
        ("llama", "rms_norm_eps", float("inf")),
        ("llama", "rope_parameters", {"rope_type": "default", "rope_theta": "x"}),
        ("qwen3_moe", "decoder_sparse_step", 0),
        ("qwen3_moe", "num_experts_per_tok", 0),
        ("qwen3_moe", "num_experts", "a"),
    ],
)
def test_a_value_that_no_model_can_have_is_refused_in_one_sentence(tmp_path, name, field, value):
    save_hf_model(tmp_path, name, tied=True)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {field: value}))
    with pytest.raises(CheckpointError, match=r"config\.json (holds a value|asks for)") as caught:
        describe_hf(tmp_path)
    assert "\n" not in str(caught.value)
