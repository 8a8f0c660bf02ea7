"""Quantized checkpoints: the optimizer's export, what it costs, the same made in a stream, and vLLM on it."""

from __future__ import annotations

import inspect
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_vcpo.checkpoint.partial_folder import PartialFolder
from megatron_vcpo.checkpoint.quantize import calibrate as quantize
from megatron_vcpo.checkpoint.quantize.calibrate import (
    REPORT_FILE,
    Mismatch,
    QuantizationReport,
    QuantizeOptions,
    _load,
    _sequences,
    _tokenizer,
)
from megatron_vcpo.checkpoint.quantize.recipe import QuantizationRecipe, is_quantized
from megatron_vcpo.commands import quantize_for_rollout
from megatron_vcpo.engines.protocol import EngineError, GenerationRequest, Sampling
from megatron_vcpo.engines.quantized import QuantizedEngine
from megatron_vcpo.engines.vllm.engine import VLLMEngine, VLLMSettings
from megatron_vcpo.models.errors import CheckpointError
from megatron_vcpo.patches import vllm_cpu_int8_saturation
from tests.oracle import tiny_models

pytestmark = pytest.mark.slow

FORMATS = ("int8", "fp8")
LARGEST = {"int8": 127.0, "fp8": 448.0}
PROMPTS, CALIBRATION, MEASURED, TOKENS = 24, 16, 8, 12


def tool(source: Path, target: Path, kind: str, *more: str) -> int:
    return quantize_for_rollout.main(
        [
            *(str(source), str(target), "--format", kind, "--environment", "sort_digits", "--seed", "5"),
            *("--calibration", str(CALIBRATION), "--measured", str(MEASURED), "--response-tokens", str(TOKENS), *more),
        ]
    )


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Path]:
    """Model and format -> quantized checkpoint; the original lies beside it under the model's name."""
    pytest.importorskip("modelopt", reason="needs nvidia-modelopt")
    root = tmp_path_factory.mktemp("quantized")
    made = {}
    for model in ("llama", "moe"):
        source = tiny_models.save(model, 0, root / model)
        for kind in FORMATS if model == "llama" else ("fp8",):
            target = root / f"{model}-{kind}"
            assert tool(source, target, kind) == 0
            made[model, kind] = target
    return made


@pytest.mark.parametrize(("model", "kind"), [("llama", "int8"), ("llama", "fp8"), ("moe", "fp8")])
def test_a_stream_of_plain_weights_becomes_the_optimizers_export_to_the_bit(
    folders: dict[tuple[str, str], Path], model: str, kind: str
) -> None:
    folder = folders[model, kind]
    plain = load_file(folder.parent / model / "model.safetensors")
    exported = load_file(folder / "model.safetensors")
    bucket = torch.empty(max(t.numel() for t in plain.values()))

    def sent() -> Any:
        for name, tensor in plain.items():  # memory is used again, as by a weight sync
            bucket.fill_(123.0)
            yield name, bucket[: tensor.numel()].view(tensor.shape).copy_(tensor)

    made = {name: tensor.clone() for name, tensor in QuantizationRecipe(folder).stream(sent())}
    assert made.keys() == exported.keys()
    for name, tensor in exported.items():
        assert made[name].dtype == tensor.dtype, name
        assert made[name].shape == tensor.shape, name
        assert torch.equal(made[name].float(), tensor.float()), name
    quantized = [name for name, tensor in exported.items() if tensor.element_size() == 1]
    assert len(quantized) == {"llama": 14, "moe": 2 * (4 + 4 * 3)}[model]


def fake_quantized(folder: Path, model: torch.nn.Module, kind: str) -> torch.nn.Module:
    """The original with the exported weights, and inputs of linear layers rounded as the exported scales say."""
    tensors = load_file(folder / "model.safetensors")

    def rounded(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        y = x / scale
        return (y.round().clamp(-128, 127) if kind == "int8" else y.to(torch.float8_e4m3fn).to(x.dtype)) * scale

    for name, module in model.named_modules():
        if f"{name}.weight_scale" in tensors:
            weight, scale = tensors[f"{name}.weight"].float(), tensors[f"{name}.weight_scale"]
            module.weight.data = weight * (scale.reshape(-1, 1) if scale.numel() > 1 else scale)
            given = tensors[f"{name}.input_scale"].reshape(())
            module.register_forward_pre_hook(lambda _, args, s=given: (rounded(args[0], s), *args[1:]))
    return model


@pytest.mark.parametrize("kind", FORMATS)
def test_the_reported_mismatch_is_that_of_the_exported_weights(folders: dict[tuple[str, str], Path], kind: str) -> None:
    folder = folders["llama", kind]
    source = folder.parent / "llama"
    model, tokenizer = _load(source), _tokenizer(source, chat=False)
    options = QuantizeOptions(
        format=kind, calibration=CALIBRATION, measured=MEASURED, response_tokens=TOKENS, max_prompt_tokens=64, seed=5
    )
    from megatron_vcpo.environments import make_environment

    environment = make_environment("sort_digits", split="train", seed=5, config={}, prompts_file=None)
    prompts = [environment.prompt(i).text for i in range(PROMPTS)]
    measured = list(_sequences(model, tokenizer, prompts, options))[CALIBRATION:]
    quantized = fake_quantized(folder, tiny_models.load(source), kind)
    gaps = []
    for ids, start in measured:
        before = tiny_models.logprobs(model, ids.tolist(), start)
        gaps.append(tiny_models.logprobs(quantized, ids.tolist(), start) - before)
    gap = np.concatenate(gaps).astype(np.float64)
    report = json.loads((folder / REPORT_FILE).read_text())
    cost = report["mismatch"]
    assert cost["tokens"] == gap.size
    assert cost["mean"] == pytest.approx(np.abs(gap).mean(), rel=0.02)
    assert cost["kl"] == pytest.approx(np.mean(np.exp(gap) - 1 - gap), rel=0.05)
    assert 0.001 < cost["mean"] < 0.3
    assert report["bytes_after"] < report["bytes_before"]
    assert report["calibration_sequences"] == CALIBRATION


@pytest.mark.engine
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_vllm_on_int8_takes_plain_weights_through_the_recipe_and_refuses_them_without(
    folders: dict[tuple[str, str], Path], dtype: Literal["float32", "bfloat16", "float16"]
) -> None:
    folder = folders["llama", "int8"]
    tiny_models.save("llama", 1, folder.parent / "other")
    engine = VLLMEngine(VLLMSettings(model_dir=str(folder), dtype=dtype, max_model_len=64, kv_cache_bytes=16 << 20))
    quantized = QuantizedEngine(engine, QuantizationRecipe(folder))
    rng = np.random.default_rng(0)
    sequences = [rng.integers(3, 99, 40).tolist() for _ in range(8)]
    report = json.loads((folder / REPORT_FILE).read_text())["mismatch"]

    def gap(original: str) -> float:
        model = tiny_models.load(folder.parent / original)
        scores = quantized.score(sequences, [8] * 8)
        expected = [tiny_models.logprobs(model, ids, 8) for ids in sequences]
        return float(np.mean([np.abs(a - b).mean() for a, b in zip(scores, expected)]))

    try:
        for version, name in enumerate(["llama", "other", "llama", "other"]):
            plain = load_file(folder.parent / name / "model.safetensors")
            arrived = quantized.update_weights(iter(plain.items()), version, verify=version == 2)
            assert quantized.version == version
            assert (arrived.received is not None) == (version == 2)
            assert 0.3 * report["mean"] < gap(name) < 3 * report["mean"]
            assert gap("other" if name == "llama" else "llama") > 10 * report["mean"]
        result = quantized.generate(
            [GenerationRequest(prompt_ids=[5, 6, 7], seed=0)], Sampling(max_tokens=4), progress=False
        )
        assert len(result[0].response_ids)
        with pytest.raises(EngineError, match="were not written"):
            engine.update_weights(iter(plain.items()), 9)
        assert quantized.version is None
    finally:
        quantized.shutdown()


@pytest.mark.engine
def test_an_engine_that_multiplies_int8_wrongly_is_refused_before_any_weights_come(
    folders: dict[tuple[str, str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm import _custom_ops

    for name in ("create_onednn_scaled_mm", "onednn_scaled_mm"):  # without the patch, which remembers its probes
        monkeypatch.setattr(_custom_ops, name, inspect.unwrap(getattr(_custom_ops, name)))
    monkeypatch.setattr(vllm_cpu_int8_saturation, "is_exact", lambda *_: False)
    folder = str(folders["llama", "int8"])
    with pytest.raises(EngineError, match=r"could not start .* run on a processor with VNNI instructions"):
        VLLMEngine(VLLMSettings(model_dir=folder, dtype="float32", max_model_len=64, kv_cache_bytes=16 << 20))


@pytest.mark.engine
def test_vllm_loads_the_fp8_export_where_it_has_the_kernels(folders: dict[tuple[str, str], Path]) -> None:
    folder = folders["llama", "fp8"]
    try:
        engine = VLLMEngine(
            VLLMSettings(model_dir=str(folder), dtype="bfloat16", max_model_len=64, kv_cache_bytes=16 << 20)
        )
    except EngineError as error:
        if "static_scaled_fp8_quant" not in str(error):
            raise
        pytest.skip("this build of vLLM for CPUs has no FP8 quantization kernel")
    quantized = QuantizedEngine(engine, QuantizationRecipe(folder))
    plain = {n: t.bfloat16() for n, t in load_file(folder.parent / "llama" / "model.safetensors").items()}
    quantized.update_weights(iter(plain.items()), 0)
    ids = list(range(5, 45))
    expected = tiny_models.logprobs(tiny_models.load(folder.parent / "llama"), ids, 8)
    gap = np.abs(quantized.score([ids], [8])[0] - expected).mean()
    quantized.shutdown()
    assert gap < 0.3


# ---------------------------------------------------------------------- refusals


def refused(capsys: pytest.CaptureFixture[str], *arguments: Any) -> str:
    assert tool(*arguments) == 2
    sentence = capsys.readouterr().err.strip().splitlines()[-1]
    assert sentence.startswith("quantize_for_rollout: ")
    return sentence


def test_the_tool_refuses_in_one_sentence_and_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("modelopt", reason="needs nvidia-modelopt")
    source = tiny_models.save("llama", 0, tmp_path / "llama")
    target = tmp_path / "target"
    assert "config.json" in refused(capsys, tmp_path, target, "int8")
    assert "exists already" in refused(capsys, source, source, "int8")
    (tmp_path / "one.jsonl").write_text('{"question": "1 + 1?", "answer": "2"}\n')
    prompts = ("--environment", "jsonl", "--prompts", str(tmp_path / "one.jsonl"))
    assert "There are 1 prompts" in refused(capsys, source, target, "int8", *prompts)
    assert "--prompts FILE" in refused(capsys, source, target, "int8", *prompts[:2])
    assert "use --format fp8" in refused(capsys, tiny_models.save("moe", 0, tmp_path / "moe"), target, "int8")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "CUDA device" in refused(capsys, source, target, "nvfp4")
    assert not list(tmp_path.glob("target*"))


Damage = Callable[[Path], object]


def settings(**changes: Any) -> Damage:
    """Change config.json."""

    def edit(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return edit


def tensors(edit: Callable[[dict[str, torch.Tensor]], object]) -> Damage:
    """Change the weights, given as a dictionary."""

    def rewrite(folder: Path) -> None:
        state = load_file(folder / "model.safetensors")
        edit(state)
        save_file(state, folder / "model.safetensors", metadata={"format": "pt"})

    return rewrite


def cut(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


DOWN = "model.layers.1.mlp.down_proj.weight"
SOURCES: dict[str, tuple[Damage, str]] = {
    "a missing tensor": (tensors(lambda state: state.pop(DOWN)), f"it lacks {DOWN}"),
    "more layers than weights": (settings(num_hidden_layers=3), "it lacks model.layers.2."),
    "another family": (settings(model_type="qwen3"), "self_attn.q_norm.weight"),
    "an unknown family": (settings(model_type="bert"), "model_type 'bert'"),
    "another shape": (tensors(lambda state: state.update({DOWN: torch.ones(64, 96)})), "the model needs (64, 128)"),
    "integers": (tensors(lambda state: state.update({DOWN: torch.ones(64, 128, dtype=torch.int8)})), "floating point"),
    "a truncated file": (cut, "is not a complete safetensors file"),
    "config.json cut": (lambda folder: (folder / "config.json").write_text("{"), "config.json is not a model"),
    "config.json a list": (lambda folder: (folder / "config.json").write_text("[]"), "config.json is not a model"),
    "quantized already": (settings(quantization_config={"quant_method": "modelopt"}), "is quantized already"),
    "no tokenizer": (lambda folder: (folder / "tokenizer.json").unlink(), "holds no Hugging Face tokenizer"),
    "a damaged tokenizer": (lambda folder: (folder / "tokenizer.json").write_text("{}"), "cannot be loaded"),
}


@pytest.mark.parametrize("case", SOURCES)
def test_a_source_that_is_no_whole_checkpoint_is_refused_before_it_is_loaded(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantize, "require_optimizer", lambda kind: None)
    monkeypatch.setattr(quantize_for_rollout, "require_optimizer", lambda kind: None)
    monkeypatch.setattr(quantize, "_load", lambda source: pytest.fail("the model was loaded"))
    damage, said = SOURCES[case]
    source = tiny_models.save("llama", 0, tmp_path / "llama")
    damage(source)
    assert said in refused(capsys, source, tmp_path / "target", "fp8")
    assert not list(tmp_path.glob("target*"))


def test_a_weight_that_is_not_finite_is_named_and_nothing_stays(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("modelopt", reason="needs nvidia-modelopt")
    source = tiny_models.save("llama", 0, tmp_path / "llama")
    tensors(lambda state: state[DOWN][3, 4].fill_(torch.nan))(source)
    assert f"not finite, in {DOWN}" in refused(capsys, source, tmp_path / "target", "fp8")
    assert not list(tmp_path.glob("target*"))


def test_flags_and_targets_that_cannot_be_are_refused_before_the_model_is_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantize, "require_optimizer", lambda kind: None)
    monkeypatch.setattr(quantize_for_rollout, "require_optimizer", lambda kind: None)
    monkeypatch.setattr(quantize, "_load", lambda source: pytest.fail("the model was loaded"))
    source, target = tiny_models.save("llama", 0, tmp_path / "llama"), tmp_path / "target"
    assert "has no chat template" in refused(capsys, source, target, "fp8", "--chat-template")
    for config in ("[]", "3", '"x"', "null"):
        assert "must be a JSON object" in refused(capsys, source, target, "fp8", "--environment-config", config)
    assert "cannot be written" in refused(capsys, source, source / "config.json" / "out", "fp8")
    assert "cannot be written" in refused(capsys, source, Path("/proc/out"), "fp8")


def test_a_partial_folder_of_someone_else_stays(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantize, "require_optimizer", lambda kind: None)
    monkeypatch.setattr(quantize_for_rollout, "require_optimizer", lambda kind: None)
    thesis = tmp_path / "target.partial" / "thesis.txt"
    thesis.parent.mkdir()
    thesis.write_text("years")
    source = tiny_models.save("llama", 0, tmp_path / "llama")
    assert "target.partial is in the way" in refused(capsys, source, tmp_path / "target", "fp8")
    assert thesis.read_text() == "years"


def test_an_interrupted_run_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(source: Path) -> Any:
        assert (tmp_path / "target.partial").is_dir()
        raise KeyboardInterrupt

    monkeypatch.setattr(quantize, "require_optimizer", lambda kind: None)
    monkeypatch.setattr(quantize_for_rollout, "require_optimizer", lambda kind: None)
    monkeypatch.setattr(quantize, "_load", interrupt)
    assert tool(tiny_models.save("llama", 0, tmp_path / "llama"), tmp_path / "target", "fp8") == 130
    assert "interrupted" in capsys.readouterr().err
    assert {p.name for p in tmp_path.iterdir()} == {"llama"}


def test_what_a_killed_run_of_this_tool_left_is_made_anew(folders: dict[tuple[str, str], Path], tmp_path: Path) -> None:
    folder = PartialFolder(tmp_path / "target", quantize._MAKER)
    (folder.path / "model.safetensors").write_text("half")
    folder.close()
    made = folders["llama", "fp8"]
    assert tool(made.parent / "llama", tmp_path / "target", "fp8") == 0
    assert {p.name for p in tmp_path.iterdir()} == {"target"}
    for name in ("model.safetensors", "config.json", "tokenizer.json"):
        assert (tmp_path / "target" / name).read_bytes() == (made / name).read_bytes()
        assert (tmp_path / "target" / name).stat().st_mode == (tmp_path / "target" / REPORT_FILE).stat().st_mode


@pytest.mark.parametrize("mean", [0.02, 1.1])
def test_a_mismatch_that_no_rollout_can_have_is_said(mean: float) -> None:
    cost = Mismatch(tokens=9, mean=mean, p99=mean, largest=mean, kl=mean, original=-1.0, quantized=-1.0)
    report = QuantizationReport(
        format="int8",
        source="",
        calibration_sequences=1,
        calibration_tokens=9,
        bytes_before=2,
        bytes_after=1,
        mismatch=cost,
    )
    assert ("too far apart" in report.lines()[-1]) == (mean > 0.3)


def write(folder: Path, quantization: dict[str, Any] | None) -> Path:
    folder.mkdir()
    config = {"model_type": "llama"} | ({"quantization_config": quantization} if quantization else {})
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_a_recipe_is_refused_from_folders_that_hold_none(tmp_path: Path) -> None:
    plain = write(tmp_path / "plain", None)
    assert not is_quantized(plain)
    with pytest.raises(CheckpointError, match="describes no quantized checkpoint"):
        QuantizationRecipe(plain)
    fp4 = write(tmp_path / "fp4", {"quant_method": "modelopt", "quant_algo": "NVFP4"})
    assert is_quantized(fp4)
    with pytest.raises(CheckpointError, match=r"is quantized as NVFP4, .* use fp8 or int8"):
        QuantizationRecipe(fp4)
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        QuantizationRecipe(tmp_path / "nothing")
    assert not is_quantized(tmp_path / "nothing")


def test_a_stream_of_another_model_is_refused(folders: dict[tuple[str, str], Path]) -> None:
    folder = folders["llama", "fp8"]
    recipe = QuantizationRecipe(folder)
    with pytest.raises(CheckpointError, match=r"model\.layers\.7\.x is not in the quantized checkpoint"):
        list(recipe.stream(iter([("model.layers.7.x", torch.zeros(1))])))
    experts = QuantizationRecipe(folders["moe", "fp8"])
    name = "model.layers.0.mlp.experts.0.gate_proj.weight"
    with pytest.raises(CheckpointError, match=r"came without those they share a scale with: model\.layers\.0"):
        list(experts.stream(iter([(name, torch.ones(32, 64))])))


@pytest.mark.parametrize("content", [None, "x", [], 3, False])
def test_a_folder_that_describes_no_quantization_is_one_sentence(tmp_path: Path, content: Any) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "quantization_config": content}))
    with pytest.raises(CheckpointError, match=r"config\.json describes no quantized checkpoint"):
        QuantizationRecipe(tmp_path)


def test_a_file_as_folder_and_a_folder_as_file_are_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "folder" / "config.json").mkdir(parents=True)
    for name in ("file", "folder"):
        with pytest.raises(CheckpointError, match=rf"{name}/config\.json cannot be read"):
            QuantizationRecipe(tmp_path / name)


def drop_layer(state: dict[str, torch.Tensor]) -> None:
    for name in [name for name in state if name.startswith("model.layers.1.")]:
        del state[name]


def put(name: str, value: torch.Tensor) -> Damage:
    return tensors(lambda state: state.update({name: value}))


def lose(name: str) -> Damage:
    return tensors(lambda state: state.pop(name))


MATRIX = "model.layers.0.self_attn.q_proj"
RECIPES: dict[str, tuple[str, Damage, str]] = {
    "no second layer": ("fp8", tensors(drop_layer), "it lacks model.layers.1.input_layernorm.weight"),
    "no norm": ("int8", lose("model.norm.weight"), "it lacks model.norm.weight"),
    "no scale of inputs": ("int8", lose(f"{MATRIX}.input_scale"), f"it lacks {MATRIX}.input_scale"),
    "no scale": ("fp8", lose(f"{MATRIX}.weight_scale"), f"{MATRIX}.weight is stored as F8_E4M3"),
    "many scales in fp8": ("fp8", put(f"{MATRIX}.weight_scale", torch.ones(64)), "(64,), one scale for the whole"),
    "few scales in int8": ("int8", put(f"{MATRIX}.weight_scale", torch.ones(3, 1)), "each of the 64 rows"),
    "one scale in int8": ("int8", put(f"{MATRIX}.weight_scale", torch.ones(())), "each of the 64 rows"),
    "integer scales": ("fp8", put(f"{MATRIX}.input_scale", torch.ones((), dtype=torch.int8)), "stored as I8"),
    "another type": ("fp8", put(f"{MATRIX}.weight", torch.zeros(64, 64, dtype=torch.int8)), "stored as I8"),
    "another shape": ("int8", put(f"{MATRIX}.weight", torch.zeros(3, 64, dtype=torch.int8)), "needs (64, 64)"),
    "a further tensor": ("fp8", put("model.layers.0.self_attn.k_proj.k_scale", torch.ones(1)), "it also holds"),
    "more layers": ("fp8", settings(num_hidden_layers=3), "it lacks model.layers.2."),
}


@pytest.mark.parametrize("case", RECIPES)
def test_tensors_that_are_not_the_models_are_named_before_anything_starts(
    case: str, folders: dict[tuple[str, str], Path], tmp_path: Path
) -> None:
    kind, damage, said = RECIPES[case]
    folder = shutil.copytree(folders["llama", kind], tmp_path / "folder")
    damage(folder)
    with pytest.raises(CheckpointError) as caught:
        QuantizationRecipe(folder)
    assert said in str(caught.value)


GROUP = {
    "weights": {"num_bits": 8, "type": "int", "strategy": "channel"},
    "input_activations": {"num_bits": 8, "type": "int", "dynamic": False},
}


@pytest.mark.parametrize(
    "groups",
    [
        {},
        None,
        [],
        {"group_0": 3},
        {"group_0": {"weights": GROUP["weights"]}},
        {"group_0": GROUP | {"weights": GROUP["weights"] | {"strategy": "tensor"}}},
        {"group_0": GROUP | {"weights": GROUP["weights"] | {"symmetric": False}}},
        {"group_0": GROUP | {"weights": GROUP["weights"] | {"num_bits": 4}}},
        {"group_0": GROUP, "group_1": GROUP | {"input_activations": None}},
    ],
)
def test_config_groups_have_to_describe_what_the_stream_makes(tmp_path: Path, groups: Any) -> None:
    quantization = {"quant_method": "compressed-tensors", "format": "int-quantized", "config_groups": groups}
    with pytest.raises(CheckpointError, match="has no config_groups of symmetric INT8 weights"):
        QuantizationRecipe(write(tmp_path / "folder", quantization))
