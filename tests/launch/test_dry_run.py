"""The dry run: rank map against Megatron-Core's own groups, counts against real models, sizes against known ones."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_vcpo.config import PluginConfig
from megatron_vcpo.launch import dry_run
from megatron_vcpo.launch.folder_lock import FolderLock
from tests.oracle.command_line import CommandLine
from tests.oracle.single_process import single_process_megatron

GIB = 1 << 30

LLAMA3_8B = {
    "num_layers": 32,
    "hidden_size": 4096,
    "ffn_hidden_size": 14336,
    "num_attention_heads": 32,
    "num_query_groups": 8,
    "kv_channels": 128,
    "padded_vocab_size": 128256,
    "bf16": True,
    "accumulate_allreduce_grads_in_fp32": True,
}


def arguments(**changes: Any) -> argparse.Namespace:
    """What the dry run reads of Megatron's arguments: a tiny dense model in fp32 on one process, and `changes`."""
    values: dict[str, Any] = {
        "world_size": 1, "tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1, "context_parallel_size": 1,
        "expert_model_parallel_size": 1, "expert_tensor_parallel_size": None, "use_tp_pp_dp_mapping": False,
        "num_layers": 2, "hidden_size": 32, "ffn_hidden_size": 64, "num_attention_heads": 4, "num_query_groups": 2,
        "group_query_attention": True, "kv_channels": 8, "swiglu": True, "add_qkv_bias": False, "qk_layernorm": False,
        "num_experts": None, "moe_ffn_hidden_size": None, "moe_layer_freq": 1, "moe_router_topk": 2,
        "untie_embeddings_and_output_weights": True, "padded_vocab_size": 64, "seq_length": 64, "bf16": False,
        "fp16": False, "accumulate_allreduce_grads_in_fp32": False, "use_distributed_optimizer": False,
        "sequence_parallel": False, "recompute_granularity": None, "moe_shared_expert_intermediate_size": None,
        "moe_router_enable_expert_bias": False, "multi_latent_attention": False, "q_lora_rank": None,
        "kv_lora_rank": 32, "qk_head_dim": 128, "qk_pos_emb_head_dim": 64, "v_head_dim": 128,
    }  # fmt: skip
    unknown = changes.keys() - values.keys()
    assert not unknown
    return argparse.Namespace(**values | changes)


def plugin(engine: int = 1, **vcpo: Any) -> PluginConfig:
    config = PluginConfig()
    config.rollout.engine_tensor_parallel_size = engine
    for name, value in vcpo.items():
        setattr(config.vcpo, name, value)
    return config


# ---------------------------------------------------------------------- ranks


@pytest.fixture
def no_model_parallel_state() -> Iterator[None]:
    from megatron.core import parallel_state

    yield
    parallel_state.destroy_model_parallel()


@pytest.mark.usefixtures("no_model_parallel_state")
@pytest.mark.parametrize(
    ("world", "tp", "pp", "cp", "ep", "expert_tp", "pp_first"),
    [
        (1, 1, 1, 1, 1, None, False),
        (8, 2, 2, 1, 1, None, False),
        (8, 4, 1, 1, 1, None, False),
        (8, 2, 1, 1, 2, None, False),
        (8, 2, 2, 1, 2, 1, False),
        (16, 2, 2, 1, 4, 1, False),
        (8, 2, 2, 1, 1, None, True),
        (16, 2, 2, 2, 1, None, False),
        (8, 2, 1, 2, 4, 1, False),
    ],
)
def test_the_rank_map_is_that_of_megatrons_own_groups(
    monkeypatch: pytest.MonkeyPatch,
    world: int,
    tp: int,
    pp: int,
    cp: int,
    ep: int,
    expert_tp: int | None,
    pp_first: bool,
) -> None:
    """initialize_model_parallel() runs once for each rank, with groups that only remember their ranks."""
    from megatron.core import parallel_state

    class Group(list[int]): ...

    rank = 0
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda group=None: group.index(rank) if group else rank)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group=None: len(group) if group else world)
    monkeypatch.setattr(torch.distributed, "new_group", lambda ranks=None, **_: Group(ranks or range(world)))
    monkeypatch.setattr(parallel_state, "create_group", lambda ranks=None, **_: Group(ranks or range(world)))
    args = arguments(
        world_size=world, tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp, context_parallel_size=cp,
        expert_model_parallel_size=ep, expert_tensor_parallel_size=expert_tp, use_tp_pp_dp_mapping=pp_first,
    )  # fmt: skip
    rows = dry_run.rank_rows(args, plugin())
    for rank in range(world):
        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(
            tp, pp, context_parallel_size=cp, expert_model_parallel_size=ep, expert_tensor_parallel_size=expert_tp,
            order="tp-cp-ep-pp-dp" if pp_first else "tp-cp-ep-dp-pp", create_gloo_process_groups=False,
        )  # fmt: skip
        groups = {
            "tp": parallel_state.get_tensor_model_parallel_group(),
            "pp": parallel_state.get_pipeline_model_parallel_group(),
            "cp": parallel_state.get_context_parallel_group(),
            "dp": parallel_state.get_data_parallel_group(),
            "ep": parallel_state.get_expert_model_parallel_group(),
        }
        actual = {name: group.index(rank) for name, group in groups.items()}
        assert {name: rows[rank][name] for name in actual} == actual
    assert [row["rank"] for row in rows] == list(range(world))


def test_engines_are_neighbouring_ranks_as_the_rollout_places_them() -> None:
    from megatron_vcpo.rollout.collector import EnginePlace

    rows = dry_run.rank_rows(arguments(world_size=8, tensor_model_parallel_size=4), plugin(engine=2))
    for row in rows:
        place = EnginePlace.of(row["rank"], 8, 2)
        assert (row["engine"], row["engine_tp"] == 0) == (place.index, place.leader)


# ---------------------------------------------------------------------- parameters and memory


@pytest.mark.parametrize(
    ("changes", "overrides"),
    [
        ({}, {}),
        ({"add_qkv_bias": True}, {"add_qkv_bias": True}),
        ({"qk_layernorm": True}, {"qk_layernorm": True}),
        ({"untie_embeddings_and_output_weights": False}, {}),
        ({"num_experts": 4, "moe_ffn_hidden_size": 32, "qk_layernorm": True}, {"qk_layernorm": True}),
        ({"num_experts": 4, "moe_ffn_hidden_size": 32, "moe_layer_freq": [0, 1]}, {"moe_layer_freq": [0, 1]}),
    ],
    ids=["dense", "qkv bias", "q and k norms", "tied", "experts", "some experts"],
)
def test_the_parameter_count_is_that_of_the_built_model(changes: dict[str, Any], overrides: dict[str, Any]) -> None:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    from tests.oracle.tiny_gpt import Size, transformer_config

    args = arguments(**changes)
    with single_process_megatron() as groups:
        config = transformer_config(Size(experts=args.num_experts or 0), **overrides)
        model = GPTModel(
            config,
            get_gpt_decoder_block_spec(config, use_transformer_engine=False),
            vocab_size=args.padded_vocab_size,
            max_sequence_length=64,
            position_embedding_type="rope",
            share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
            pg_collection=groups,
        )
        assert dry_run.count_parameters(args).total == sum(p.numel() for p in model.parameters())


QWEN3_30B_A3B = {
    "num_layers": 48, "hidden_size": 2048, "ffn_hidden_size": 6144, "num_attention_heads": 32, "num_query_groups": 4,
    "kv_channels": 128, "qk_layernorm": True, "num_experts": 128, "moe_ffn_hidden_size": 768, "moe_router_topk": 8,
    "padded_vocab_size": 151936, "bf16": True, "accumulate_allreduce_grads_in_fp32": True,
}  # fmt: skip
DEEPSEEK_V3 = {
    "num_layers": 61, "hidden_size": 7168, "ffn_hidden_size": 18432, "num_attention_heads": 128,
    "multi_latent_attention": True, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_head_dim": 128,
    "qk_pos_emb_head_dim": 64, "v_head_dim": 128, "qk_layernorm": True, "num_experts": 256, "moe_router_topk": 8,
    "moe_ffn_hidden_size": 2048, "moe_layer_freq": [0] * 3 + [1] * 58, "moe_shared_expert_intermediate_size": 2048,
    "moe_router_enable_expert_bias": True, "padded_vocab_size": 129280, "bf16": True,
    "accumulate_allreduce_grads_in_fp32": True,
}  # fmt: skip


@pytest.mark.parametrize(("model", "count"), [(QWEN3_30B_A3B, 30_532_122_624), (DEEPSEEK_V3, 671_026_419_200)])
def test_the_large_mixtures_have_the_published_numbers_of_parameters(model: dict[str, Any], count: int) -> None:
    assert dry_run.count_parameters(arguments(**model)).total == count


@pytest.mark.parametrize("q_lora_rank", [None, 16], ids=["direct queries", "latent queries"])
def test_the_count_of_latent_attention_and_shared_experts_is_that_of_the_built_model(q_lora_rank: int | None) -> None:
    from megatron_vcpo.models.building.offline import args_from_flags, build_model, single_process

    flags = ["--num-layers", "3", "--hidden-size", "32", "--num-attention-heads", "4", "--ffn-hidden-size", "48"]
    flags += ["--multi-latent-attention", "--kv-lora-rank", "12", "--qk-head-dim", "8", "--qk-pos-emb-head-dim", "4"]
    flags += ["--v-head-dim", "6", "--qk-layernorm", "--num-experts", "8", "--moe-ffn-hidden-size", "24"]
    flags += ["--moe-layer-freq", "[0,1,1]", "--moe-shared-expert-intermediate-size", "40", "--moe-router-topk", "2"]
    flags += ["--moe-router-score-function", "sigmoid", "--moe-router-enable-expert-bias", "--swiglu"]
    flags += ["--normalization", "RMSNorm", "--disable-bias-linear", "--untie-embeddings-and-output-weights"]
    flags += ["--position-embedding-type", "rope", "--rope-type", "rope", "--max-position-embeddings", "64"]
    flags += ["--padded-vocab-size", "128", "--moe-router-dtype", "fp32"]
    flags += ["--q-lora-rank", str(q_lora_rank)] if q_lora_rank else []
    with single_process():
        args = args_from_flags(flags)
        model = build_model(args, weights=False)
    biases = [buffer for name, buffer in model.named_buffers() if name.endswith("expert_bias")]
    assert len(biases) == 2
    built = sum(tensor.numel() for tensor in [*model.parameters(), *biases])
    assert dry_run.count_parameters(args).total == built


def test_the_cache_of_latent_attention_holds_latents_on_every_rank() -> None:
    config = plugin(engine=32)
    config.rollout.engine_kv_cache_bytes = GIB
    # 61 layers x (512 of the latent + 64 rotated) x 2 bytes
    assert dry_run.cache_tokens(arguments(**DEEPSEEK_V3), config) == GIB // (61 * 576 * 2)


def test_an_uneven_pipeline_is_measured_at_its_fullest_stage() -> None:
    args = arguments(**LLAMA3_8B | {"num_layers": 31}, world_size=2, pipeline_model_parallel_size=2)
    counts = dry_run.count_parameters(args)
    assert dry_run._state_bytes(args) == pytest.approx(18 * (counts.layers * 16 / 31 + counts.embedding))


def test_llama_3_8b_has_the_published_number_of_parameters() -> None:
    assert dry_run.count_parameters(arguments(**LLAMA3_8B)).total == 8_030_261_248


def test_optimizer_state_is_eighteen_bytes_a_parameter_in_bf16_and_sixteen_in_fp32() -> None:
    total = 8_030_261_248
    assert dry_run._state_bytes(arguments(**LLAMA3_8B)) == 18 * total
    assert dry_run._state_bytes(arguments(**LLAMA3_8B | {"bf16": False})) == 16 * total


def test_the_distributed_optimizer_divides_its_state_over_data_parallel_ranks() -> None:
    layout = {"world_size": 8, "tensor_model_parallel_size": 2, "use_distributed_optimizer": True}
    assert dry_run._state_bytes(arguments(**LLAMA3_8B, **layout)) == (6 + 12 / 4) * 8_030_261_248 / 2


def test_a_pipeline_stage_holds_its_layers_and_one_table() -> None:
    args = arguments(**LLAMA3_8B, world_size=2, pipeline_model_parallel_size=2)
    table = 4096 * 128256
    assert dry_run._state_bytes(args) == 18 * ((8_030_261_248 - 2 * table) / 2 + table)


def test_experts_are_divided_over_expert_parallel_ranks_only() -> None:
    moe = {"num_experts": 4, "moe_ffn_hidden_size": 64}
    one = dry_run._state_bytes(arguments(**moe))
    two = dry_run._state_bytes(arguments(**moe, world_size=2, expert_model_parallel_size=2))
    experts = 2 * 3 * 32 * 64 * 4
    assert dry_run.count_parameters(arguments(**moe)).experts == experts
    assert one - two == 16 * experts / 2


def test_activations_grow_with_the_token_budget_and_shrink_with_parallelism_and_recomputation() -> None:
    def size(budget: int = 4096, **changes: Any) -> float:
        return dry_run._activation_bytes(arguments(**LLAMA3_8B, **changes), plugin(tokens_per_micro_batch=budget))

    base = size()
    assert base == pytest.approx(32 * 4096 * 4096 * (18 + 4 * 3.5))  # layers, tokens, hidden size, table 2
    assert size(8192) == 2 * base
    assert size(context_parallel_size=2) == base / 2
    tp = {"world_size": 2, "tensor_model_parallel_size": 2}
    assert size(**tp, sequence_parallel=True) == base / 2
    assert base / 2 < size(**tp) < base
    assert size(recompute_granularity="full") < base / 5


def test_a_logit_chunk_bounds_the_logits() -> None:
    whole = dry_run._logit_bytes(arguments(**LLAMA3_8B), plugin(tokens_per_micro_batch=4096))
    assert whole == 4096 * 128256 * 10
    chunked = dry_run._logit_bytes(arguments(**LLAMA3_8B), plugin(tokens_per_micro_batch=4096, logit_chunk=512))
    assert chunked == whole / 8


def test_the_cache_holds_what_the_bytes_of_keys_and_values_say() -> None:
    config = plugin(engine=2)
    config.rollout.engine_kv_cache_bytes = GIB
    # 2 (keys, values) x 32 layers x 4 heads of this rank x 128 x 2 bytes
    assert dry_run.cache_tokens(arguments(**LLAMA3_8B), config) == GIB // (2 * 32 * 4 * 128 * 2)


def test_a_quantized_engine_holds_a_byte_for_each_weight() -> None:
    def weights(quantization: str | None) -> float:
        config = plugin()
        config.rollout.engine_quantization, config.rollout.engine_dtype = quantization, "bfloat16"
        row = re.search(r"engine: weights +([\d.]+)", dry_run._memory(arguments(**LLAMA3_8B), config))
        assert row
        return float(row[1])

    assert weights(None) == pytest.approx(2 * 8_030_261_248 / GIB, abs=0.01)
    assert weights("fp8") == pytest.approx(8_030_261_248 / GIB, abs=0.01)


# ---------------------------------------------------------------------- the report


def test_the_report_names_the_lag_the_batch_and_every_flag(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    line = CommandLine(tmp_path, monkeypatch)
    args, config = line.check("--rollout-max-lag", "3", "--vcpo-dry-run-processes", "4")
    text = dry_run.report(args, config)
    assert re.search(r"trajectories a step +16 \(4 prompts x 4 responses\)", text)
    assert re.search(r"steps fed by one rollout phase +4 \(64 trajectories\)", text)
    assert re.search(r"age of the oldest token, at most +3 steps", text)
    assert "Rank map (4 processes, 4 engines of 1 rank)" in text
    assert re.search(r"^ +3 +0 +0 +0 +3 +0 +3 +0$", text, re.MULTILINE)
    for prefix in ("vcpo", "rollout", "sync"):
        for name in vars(getattr(config, prefix)):
            assert f"--{prefix}-{name.replace('_', '-')} " in text
    assert all(len(row) <= 120 for row in text.splitlines() if str(tmp_path) not in row)


def test_bounds_of_the_correction_are_shown_resolved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    line = CommandLine(tmp_path, monkeypatch)
    text = dry_run.report(*line.check("--vcpo-correction", "icepop"))
    assert re.search(r"--vcpo-correction-lower +0\.5", text)
    assert re.search(r"--vcpo-correction-upper +5\.0", text)


def test_what_the_run_would_choose_is_shown_resolved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    line = CommandLine(tmp_path, monkeypatch)

    def values(*flags: str) -> dict[str, str]:
        rows = re.findall(r"^  (--\S+) +(.*)$", dry_run.report(*line.check(*flags)), re.MULTILINE)
        return {flag.removeprefix("--"): value for flag, value in rows}

    found = values("--rollout-max-lag", "3", "--vcpo-ess-reference", "auto")
    assert found["rollout-steps-per-phase"] == "4"
    assert found["rollout-run-dir"] == "runs/<date-time>"
    assert found["rollout-engine-dtype"] == "float32"
    assert found["sync-verify-tolerance"] == "0.001"
    assert found["vcpo-ess-reference"] == "auto"
    assert found["vcpo-dry-run-processes"] == "1"
    save = str(tmp_path / "save")
    found = values("--save", save, "--save-interval", "2", "--bf16", "--sync-interval", "2", "--rollout-max-lag", "1")
    assert found["rollout-steps-per-phase"] == "1"
    assert found["rollout-run-dir"] == save
    assert found["rollout-engine-dtype"] == "bfloat16"
    assert found["sync-verify-tolerance"] == "0.1"
    unset = {flag for flag, value in found.items() if value == "-"}
    files = {
        "vcpo-advantages",
        "vcpo-load-hf",
        "rollout-prompts",
        "rollout-eval-prompts",
        "rollout-engine-quantization",
    }
    assert unset == files | {"rollout-stop"}


def test_a_machine_without_the_gpu_packages_is_told_what_the_run_will_need(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = CommandLine(tmp_path, monkeypatch)
    gpu = ("--transformer-impl", "transformer_engine", "--distributed-backend", "nccl", "--bf16")
    monkeypatch.setattr(dry_run.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    text = dry_run.report(*line.check(*gpu, "--vcpo-kl-coefficient", "0.1"))
    assert "Transformer Engine is not installed here" in text
    assert "no CUDA device" in text
    assert "KL reference" in text
    assert "Notes" not in dry_run.report(*line.check())


def test_a_long_rank_map_is_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    line = CommandLine(tmp_path, monkeypatch)
    flags = ("--vcpo-dry-run-processes", "64", "--rollout-prompts-per-step", "16")
    assert "... and 32 more" in dry_run.report(*line.check(*flags))


def test_a_dry_run_locks_nothing_and_writes_nothing_also_where_a_run_is_going_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from megatron_vcpo import train

    command_line, run = CommandLine(tmp_path, monkeypatch), tmp_path / "run"
    run.mkdir()
    lock = FolderLock(run, "--save")
    before = sorted((path, path.stat().st_mtime_ns) for path in (tmp_path, *tmp_path.rglob("*")))
    save = ("--save", str(run), "--save-interval", "2", "--vcpo-dry-run")
    monkeypatch.setattr("sys.argv", ["train.py", *command_line.flags(*save)])
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(train.logs, "quiet_libraries", lambda: None)
    train.main()
    assert "nothing was started" in capsys.readouterr().out
    assert sorted((path, path.stat().st_mtime_ns) for path in (tmp_path, *tmp_path.rglob("*"))) == before
    lock.close()
