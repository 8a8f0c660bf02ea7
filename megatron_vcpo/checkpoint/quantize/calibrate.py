"""Quantize a Hugging Face checkpoint for rollouts with NVIDIA's Model Optimizer, and measure the loss in accuracy."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron_vcpo.checkpoint.load_hf import check_hf_folder
from megatron_vcpo.checkpoint.model_files import CONFIG, load_tokenizer, read_model_folder, write_into
from megatron_vcpo.checkpoint.partial_folder import PartialFolder
from megatron_vcpo.checkpoint.quantize.recipe import is_quantized
from megatron_vcpo.environments import Prompt
from megatron_vcpo.environments.encoding import encode_prompt
from megatron_vcpo.models.description.hf import describe_hf
from megatron_vcpo.models.errors import CheckpointError, some
from megatron_vcpo.objective import kl_estimate

CONFIGURATIONS = {"fp8": "FP8_DEFAULT_CFG", "int8": "INT8_DEFAULT_CFG", "nvfp4": "NVFP4_DEFAULT_CFG"}
"""Format -> the optimizer's configuration: static scales, from the largest magnitude."""

TOO_FAR = 0.3
"""Mean mismatch, nats a token, above which training refuses the engine after the first sync
(--sync-verify-tolerance)."""

REPORT_FILE = "quantization_report.json"
_MAKER = {"to": "quantized"}  # marks a partial folder as this tool's; the report says what it was made from


@dataclass(frozen=True, slots=True, kw_only=True)
class Mismatch:
    """The quantized model's log-probs compared with the original's, on tokens that the original sampled."""

    tokens: int
    mean: float  # of absolute differences, nats
    p99: float
    largest: float
    kl: float  # k3 estimate of KL(original, quantized), nats a token
    original: float  # mean log-prob of those tokens before quantization
    quantized: float  # the same after it


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizationReport:
    """What was made, from what, and with what mismatch."""

    format: str
    source: str
    calibration_sequences: int
    calibration_tokens: int
    bytes_before: int
    bytes_after: int
    mismatch: Mismatch

    def lines(self) -> list[str]:
        """The report as readable lines."""
        cost = self.mismatch
        verdict = []
        if cost.mean > TOO_FAR:
            verdict = [
                f"too far apart for rollouts (above {TOO_FAR:g}): choose another format, or calibrate on more prompts"
            ]
        return [
            f"{self.format}: {self.bytes_before:,} -> {self.bytes_after:,} bytes, calibrated on "
            f"{self.calibration_sequences} sequences ({self.calibration_tokens:,} tokens)",
            f"log-prob mismatch on {cost.tokens:,} sampled tokens that were not calibrated on, nats a token: "
            f"mean {cost.mean:.2e}, 99% {cost.p99:.2e}, largest {cost.largest:.2e}, KL (k3) {cost.kl:.2e}",
            *verdict,
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizeOptions:
    """Format, number of prompts and length of responses."""

    format: str
    calibration: int  # number of prompts to calibrate on
    measured: int  # number of further prompts to measure the mismatch on
    response_tokens: int  # tokens that the original model samples after each prompt
    max_prompt_tokens: int
    chat: bool = False  # wrap each prompt as one user message
    seed: int = 0
    progress: Callable[[str], object] = lambda _: None


def require_optimizer(kind: str) -> None:
    """Raise CheckpointError if Model Optimizer is missing, or the format needs a GPU and there is none."""
    try:
        import modelopt.torch.quantization  # noqa: F401
    except ImportError as error:
        raise CheckpointError(
            f"NVIDIA's Model Optimizer cannot be imported ({error}); pip install nvidia-modelopt==0.47.0."
        ) from error
    if kind == "nvfp4" and not torch.cuda.is_available():
        raise CheckpointError("--format nvfp4 needs a CUDA device, and there is none here; use fp8 or int8.")


def quantize(source: Path, target: Path, prompts: Sequence[str], options: QuantizeOptions) -> QuantizationReport:
    """Calibrate, measure, and write a checkpoint that vLLM loads; `target` appears only when it is complete.

    Args:
        source: Hugging Face folder with its tokenizer.
        target: folder to create.
        prompts: texts; the first ones are for calibration, the next ones for measuring.
        options: format, number of prompts and length of responses.

    Raises:
        CheckpointError: Model Optimizer is missing, there are too few prompts, the source is not a complete unquantized
            checkpoint of a known family with its tokenizer, or the target cannot be created.
    """
    require_optimizer(options.format)
    if len(prompts) < options.calibration + options.measured:
        raise CheckpointError(
            f"There are {len(prompts)} prompts; {options.calibration} to calibrate on (--calibration) and "
            f"{options.measured} to measure (--measured) need {options.calibration + options.measured}."
        )
    if target.exists():
        raise CheckpointError(f"{target} exists already; name a new folder.")
    _check_source(source, options.format)
    files = read_model_folder(source)
    files.require_tokenizer(source, "SOURCE")
    tokenizer = _tokenizer(source, chat=options.chat)
    folder = PartialFolder(target, _MAKER)
    try:
        result = _quantize_into(folder, source, tokenizer, prompts, options)
        write_into(folder, files.laid_out(json.loads((folder.path / CONFIG).read_text())))
        folder.write_text(REPORT_FILE, json.dumps(dataclasses.asdict(result), indent=2) + "\n")
    except BaseException as error:
        folder.discard()
        if isinstance(error, OSError):
            raise CheckpointError(f"{target} could not be written: {error}.") from error
        raise
    folder.commit()
    return result


def _check_source(source: Path, kind: str) -> None:
    """Check what config.json and the headers of the files tell about the weights."""
    model = describe_hf(source)
    if is_quantized(source):
        raise CheckpointError(f"{source} is quantized already; give the original checkpoint.")
    if kind == "int8" and model.num_experts:
        raise CheckpointError("--format int8: vLLM has no INT8 experts with calibrated activations; use --format fp8.")
    check_hf_folder(source)


def _quantize_into(
    folder: PartialFolder, source: Path, tokenizer: Any, prompts: Sequence[str], options: QuantizeOptions
) -> QuantizationReport:
    """Sample, calibrate, measure, and write the model."""
    model = _load(source)
    options.progress("sampling responses")
    sequences = list(_sequences(model, tokenizer, prompts, options))
    calibrated, measured = sequences[: options.calibration], sequences[options.calibration :]
    before = _logprobs(model, measured)
    options.progress("calibrating")
    model = _calibrate(model, options.format, calibrated)
    after = _logprobs(model, measured)
    options.progress("writing")
    _export(model, folder.path, options.format)
    folder.adopt_all()
    return QuantizationReport(
        format=options.format,
        source=str(source.absolute()),
        calibration_sequences=len(calibrated),
        calibration_tokens=sum(ids.numel() for ids, _ in calibrated),
        bytes_before=_checkpoint_bytes(source),
        bytes_after=_checkpoint_bytes(folder.path),
        mismatch=_mismatch(before, after),
    )


_Sequence = tuple[torch.Tensor, int]  # token ids [n], and the length of the prompt


def _tokenizer(source: Path, *, chat: bool) -> Any:
    """The source's tokenizer; CheckpointError if `chat` needs a chat template and it has none."""
    tokenizer = load_tokenizer(source)
    if chat and not getattr(tokenizer, "chat_template", None):
        raise CheckpointError(f"--chat-template: the tokenizer of {source} has no chat template; drop the flag.")
    return tokenizer


def _load(source: Path) -> Any:
    """The model on the device; CheckpointError if it cannot be loaded or a weight is not finite."""
    from transformers import AutoModelForCausalLM

    device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        model = AutoModelForCausalLM.from_pretrained(source, dtype="auto", local_files_only=True).to(device).eval()
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{source} cannot be loaded: {' '.join(str(error).split())}") from error
    if damaged := [name for name, weight in model.named_parameters() if not bool(torch.isfinite(weight).all())]:
        raise CheckpointError(f"{source} holds values that are not finite, in {some(damaged)}; it is damaged.")
    return model


@torch.no_grad()
def _sequences(model: Any, tokenizer: Any, prompts: Sequence[str], options: QuantizeOptions) -> Iterator[_Sequence]:
    """Prompts, each with a response sampled at temperature 1, like the tokens of rollouts."""
    torch.manual_seed(options.seed)
    for text in prompts[: options.calibration + options.measured]:
        ids = encode_prompt(tokenizer, Prompt(text=text), chat=options.chat)[1][-options.max_prompt_tokens :]
        if not ids:
            raise CheckpointError(f"The tokenizer makes no token of the prompt {text[:60]!r}.")
        prompt = torch.tensor([ids], device=model.device)
        whole = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=options.response_tokens,
            min_new_tokens=1,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
        )
        yield whole[0], len(ids)


@torch.no_grad()
def _logprobs(model: Any, sequences: Sequence[_Sequence]) -> torch.Tensor:
    """Log-probs of all response tokens, [N] fp64."""
    found = []
    for ids, start in sequences:
        logits = model(ids[None]).logits[0, start - 1 : -1].double()
        found.append(torch.log_softmax(logits, -1).gather(1, ids[start:, None])[:, 0].cpu())
    return torch.cat(found)


def _calibrate(model: Any, kind: str, sequences: Sequence[_Sequence]) -> Any:
    import modelopt.torch.quantization as mtq

    @torch.no_grad()
    def forward(quantizing: Any) -> None:
        for ids, _ in sequences:
            quantizing(ids[None])

    return mtq.quantize(model, getattr(mtq, CONFIGURATIONS[kind]), forward)


def _mismatch(before: torch.Tensor, after: torch.Tensor) -> Mismatch:
    difference = after - before
    if not bool(torch.isfinite(difference).all()):
        raise CheckpointError("The quantized model's log-probs are not finite: this format cannot hold it.")
    sizes = difference.abs()
    return Mismatch(
        tokens=len(sizes),
        mean=float(sizes.mean()),
        p99=float(sizes.quantile(0.99)),
        largest=float(sizes.max()),
        kl=float(kl_estimate(before.double(), after.double(), "k3").mean()),
        original=float(before.mean()),
        quantized=float(after.mean()),
    )


def _checkpoint_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


# ---------------------------------------------------------------------- what vLLM loads


def _export(model: Any, folder: Path, kind: str) -> None:
    from modelopt.torch.export import export_hf_checkpoint

    export_hf_checkpoint(model, export_dir=folder)
    if kind == "int8":
        _as_compressed_tensors(folder)


def _as_compressed_tensors(folder: Path) -> None:
    """Turn the optimizer's INT8 export into the compressed-tensors format.

    vLLM reads the optimizer's own format only for FP8 and FP4. The integers are the same; in compressed-tensors, a
    scale for each channel is a column, and a scale for activations has one element.
    """
    from safetensors.torch import load_file, save_file

    for file in folder.glob("*.safetensors"):
        tensors = load_file(file)
        for name, tensor in tensors.items():
            if name.endswith(".weight_scale"):
                tensors[name] = tensor.reshape(-1, 1)
            elif name.endswith(".input_scale"):
                tensors[name] = tensor.reshape(1)
        save_file(tensors, file, metadata={"format": "pt"})
    path = folder / "config.json"
    config = json.loads(path.read_text())
    common = {"num_bits": 8, "type": "int", "symmetric": True, "dynamic": False}
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "quantization_status": "compressed",
        "ignore": config["quantization_config"]["ignore"],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {**common, "strategy": "channel"},
                "input_activations": {**common, "strategy": "tensor"},
            }
        },
    }
    path.write_text(json.dumps(config, indent=2) + "\n")
    (folder / "hf_quant_config.json").unlink(missing_ok=True)  # describes the other format
