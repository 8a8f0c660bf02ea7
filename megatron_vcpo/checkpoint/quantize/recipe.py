"""QuantizationRecipe: how a quantized checkpoint's weights are made, so that a weight sync can quantize new weights
alike.

NVIDIA's Model Optimizer takes the weights' scales from the weights alone (their largest magnitude) and the activations'
scales from calibration. So a weight sync can quantize its stream without the optimizer and without prompts: weights and
their scales are computed anew, the activations' scales stay as calibrated. `tests/checkpoint/test_quantize.py` compares
the result with the optimizer's own export, bit by bit.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import torch

from megatron_vcpo.checkpoint.safetensors_folder import SafetensorsFolder
from megatron_vcpo.models.description.hf import describe_hf
from megatron_vcpo.models.errors import CheckpointError, some

Format = Literal["fp8", "int8"]
Named = tuple[str, torch.Tensor]

_LARGEST = {"fp8": 448.0, "int8": 127.0}
_COMMAND = "vcpo-quantize-for-rollout (in a checkout, tools/quantize_for_rollout.py)"
_STORED = {"fp8": "F8_E4M3", "int8": "I8"}
# What a folder may hold besides a model's tensors: a tied output layer, and buffers of old checkpoints.
_BESIDE = re.compile(r"^lm_head\.weight$|\.rotary_emb\.inv_freq$")
# Projections that engines compute as one matrix; the optimizer gives some of them a common scale.
_FUSED = (
    re.compile(r"^(.*\.self_attn)\.[qkv]_proj\.weight$"),
    re.compile(r"^(.*)\.(?:gate|up)_proj\.weight$"),
)


class QuantizationRecipe:
    """Which weights of a checkpoint are quantized, in which format, and the activations' scales.

    Args:
        folder: written by the command quantize_for_rollout.

    Raises:
        CheckpointError: the folder holds no quantized checkpoint, or one in a format that cannot be made in a stream,
            or its tensors are not those of the model in its config.json.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        config = _quantization(self.folder)
        self.format = _format(self.folder, config)
        files = SafetensorsFolder(folder)
        names = files.names()
        self.weights = {n.removesuffix("_scale") for n in names if n.endswith(".weight_scale")}
        self.plain = {n for n in names if not n.endswith("_scale")} - self.weights
        if not self.weights:
            raise CheckpointError(f"{folder} holds no quantized weights.")
        self._check_tensors(files, static=self.format == "fp8" or _is_static(config))
        self._scale_shapes = {n: files.shape(f"{n}_scale") for n in self.weights}
        self._input_scales = {n: files.slice(n)[...] for n in names if n.endswith(".input_scale")}
        self._groups = self._shared_scales(files) if self.format == "fp8" else {}

    def stream(self, tensors: Iterator[Named]) -> Iterator[Named]:
        """Quantize a stream of tensors: the recipe's weights come with their scales, everything else unchanged.

        Args:
            tensors: a complete set by Hugging Face names; a tensor's memory may be reused once the next one is asked
                for.

        Raises:
            CheckpointError: a tensor that the checkpoint does not hold, or a weight without the others that share its
                scale.
        """
        waiting: dict[str, list[Named]] = {}
        for name, tensor in tensors:
            if name in self.plain:
                yield name, tensor
                continue
            if name not in self.weights:
                raise CheckpointError(
                    f"{name} is not in the quantized checkpoint {self.folder}: it is another model's."
                )
            key, size = self._groups.get(name, (name, 1))
            group = waiting.setdefault(key, [])
            group.append((name, tensor if len(group) + 1 == size else tensor.clone()))
            if len(group) == size:
                yield from self._quantized(waiting.pop(key))
        if waiting:
            raise CheckpointError(f"Weights came without those they share a scale with: {', '.join(sorted(waiting))}.")

    def _check_tensors(self, files: SafetensorsFolder, *, static: bool) -> None:
        """Check that names, shapes and dtypes are those of the model in config.json, and each quantized weight has its
        scales."""
        model = describe_hf(self.folder)
        shapes = dict(pair for spec in model.family.parameters(model.shape(model.vocab_size)) for pair in spec.hf)
        names = files.names()
        scales = {f"{weight}_scale" for weight in self.weights}
        inputs = {f"{weight.removesuffix('weight')}input_scale" for weight in self.weights}
        needed = shapes.keys() | scales | (inputs if static else set())
        unknown = {name for name in names - needed - inputs if not _BESIDE.search(name)}
        problems = [f"it lacks {some(needed - names)}"] if needed - names else []
        problems += [f"it also holds {some(unknown)}"] if unknown else []
        odd = {name: self._oddity(name, shapes, files) for name in names & (needed | inputs)}
        if wrong := [f"{name} is {what}" for name, what in odd.items() if what]:
            problems.append(some(wrong))
        if problems:
            raise CheckpointError(
                f"{self.folder} does not hold the {self.format} weights of the {model.family.name} model in its "
                f"config.json: {'; '.join(problems)}; quantize it again with {_COMMAND}."
            )

    def _oddity(self, name: str, shapes: dict[str, tuple[int, ...]], files: SafetensorsFolder) -> str | None:
        """What is wrong with a tensor; None if it is right."""
        shape, kind = files.shape(name), files.dtype(name)
        quantized = name in self.weights
        if kind != _STORED[self.format] if quantized else not files.is_float(name):
            return f"stored as {kind}"
        if name in shapes:
            right = shape == shapes[name] and (len(shape) == 2 or not quantized)
            return None if right else f"{shape}, the model needs {shapes[name]}"
        rows = shapes.get(name.removesuffix("_scale"), (0,))[0]
        if name.endswith(".weight_scale") and self.format == "int8":
            return None if shape == (rows, 1) else f"{shape}, one scale for each of the {rows} rows is needed"
        return None if math.prod(shape) == 1 else f"{shape}, one scale for the whole matrix is needed"

    def _shared_scales(self, files: SafetensorsFolder) -> dict[str, tuple[str, int]]:
        """Weights that share one scale: name -> (name of the group, its size)."""
        scales: dict[str, dict[str, float]] = {}
        for name in self.weights:
            for pattern in _FUSED:
                if match := pattern.match(name):
                    scales.setdefault(match[1], {})[name] = float(files.slice(f"{name}_scale")[...])
        shared = {key: group for key, group in scales.items() if len(set(group.values())) == 1}
        return {name: (key, len(group)) for key, group in shared.items() for name in group}

    def _quantized(self, group: list[Named]) -> Iterator[Named]:
        shared = None  # one scale for the whole matrix; INT8 has one for each row instead
        if self.format == "fp8":
            shared = torch.stack([weight.abs().amax().float() for _, weight in group]).amax() / _LARGEST["fp8"]
        for name, weight in group:
            scale = weight.abs().amax(dim=1).float() / _LARGEST["int8"] if shared is None else shared
            # The weight comes last: vLLM counts elements to know when a layer is complete, and every projection of a
            # fused layer repeats the scale of its inputs.
            inputs = f"{name.removesuffix('weight')}input_scale"
            if inputs in self._input_scales:
                yield inputs, self._input_scales[inputs]
            yield f"{name}_scale", scale.reshape(self._scale_shapes[name])
            yield name, _rounded(weight, scale, self.format)


def _rounded(weight: torch.Tensor, scale: torch.Tensor, kind: Format) -> torch.Tensor:
    """Round as the optimizer does; an all-zero row has scale 0 and stays zero."""
    safe = torch.where(scale > 0.0, scale, torch.ones_like(scale))
    if kind == "fp8":
        return (weight / safe).to(torch.float8_e4m3fn)
    return (weight / safe[:, None]).round().clamp(-128, 127).to(torch.int8)


def is_quantized(folder: str | Path) -> bool:
    """Whether the folder's config.json says that its weights are quantized."""
    try:
        return bool(json.loads((Path(folder) / "config.json").read_text()).get("quantization_config"))
    except (OSError, ValueError, AttributeError):
        return False


def _quantization(folder: Path) -> dict[str, Any]:
    """The quantization section of config.json."""
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text())["quantization_config"]
    except FileNotFoundError as error:
        raise CheckpointError(f"{folder} holds no config.json.") from error
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}.") from error
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} describes no quantized checkpoint.") from error
    if not isinstance(config, dict):
        raise CheckpointError(f"{path} describes no quantized checkpoint.")
    return config


def _format(folder: Path, config: dict[str, Any]) -> Format:
    if config.get("quant_method") == "modelopt" and config.get("quant_algo") == "FP8":
        return "fp8"
    if config.get("quant_method") == "compressed-tensors" and config.get("format") == "int-quantized":
        groups = config.get("config_groups")
        if not (isinstance(groups, dict) and groups and all(map(_is_w8a8, groups.values()))):
            raise CheckpointError(
                f"{folder / 'config.json'} has no config_groups of symmetric INT8 weights with a scale for each "
                f"channel and INT8 activations; quantize it again with {_COMMAND}."
            )
        return "int8"
    found = config.get("quant_algo") or config.get("format") or config.get("quant_method")
    raise CheckpointError(
        f"{folder} is quantized as {found}, which is not made anew at every weight sync; use fp8 or int8 of {_COMMAND}."
    )


def _is_w8a8(group: Any) -> bool:
    """Whether a group of compressed-tensors has INT8 weights, a scale for each channel, and INT8 activations."""
    if not isinstance(group, dict):
        return False
    return _is_int8(group.get("weights"), "channel") and _is_int8(group.get("input_activations"))


def _is_int8(numbers: Any, strategy: str | None = None) -> bool:
    if not isinstance(numbers, dict) or strategy not in (None, numbers.get("strategy")):
        return False
    return numbers.get("num_bits") == 8 and numbers.get("type") == "int" and bool(numbers.get("symmetric", True))


def _is_static(config: dict[str, Any]) -> bool:
    """Whether every group's activations have calibrated scales."""
    return not any(group["input_activations"].get("dynamic") for group in config["config_groups"].values())
