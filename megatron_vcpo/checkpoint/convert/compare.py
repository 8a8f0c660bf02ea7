"""Check whether two checkpoints are the same model, tensor by tensor (the ledger) and by the logits they compute."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from megatron_vcpo.checkpoint.convert.source import CheckpointSource, HuggingFaceSource, MegatronSource
from megatron_vcpo.models.description import ModelDescription
from megatron_vcpo.models.errors import CheckpointError

_PROMPTS, _LENGTH = 4, 24
# Largest difference over largest logit. With equal weights, the order of fp32 operations gives 1e-6 to 1e-5 (measured).
LOGIT_TOLERANCE = 1e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """How one tensor differs."""

    name: str
    what: str  # shape, dtype or values
    largest: float = math.nan  # largest absolute difference of its values
    relative: float = math.nan  # norm of the difference over norm


@dataclass(slots=True)
class Ledger:
    """The comparison of every tensor of two checkpoints."""

    equal: int = 0  # tensors equal bit for bit
    rounded: int = 0  # tensors equal once the wider is rounded to the narrower dtype
    differences: list[Difference] = field(default_factory=list)
    only_a: list[str] = field(default_factory=list)
    only_b: list[str] = field(default_factory=list)

    @property
    def same(self) -> bool:
        """Whether both hold the same values, up to rounding to their dtypes."""
        return not (self.differences or self.only_a or self.only_b)

    def lines(self, limit: int = 20) -> Iterator[str]:
        """Readable lines on what differs, largest differences first."""
        for title, names in (("only in A", self.only_a), ("only in B", self.only_b)):
            for name in names[:limit]:
                yield f"{title}: {name}"
            if len(names) > limit:
                yield f"{title}: {len(names) - limit} more"
        ranked = sorted(self.differences, key=lambda d: -math.inf if math.isnan(d.relative) else -d.relative)
        for d in ranked[:limit]:
            size = "" if math.isnan(d.largest) else f" (largest difference {d.largest:.3g}, relative {d.relative:.3g})"
            yield f"{d.name}: {d.what}{size}"
        if len(ranked) > limit:
            yield f"{len(ranked) - limit} more tensors differ"
        yield (
            f"{self.equal} tensors equal bit for bit, {self.rounded} equal after rounding to the narrower type, "
            f"{len(self.differences)} different, {len(self.only_a)} only in A, {len(self.only_b)} only in B"
        )


def description_differences(a: ModelDescription, b: ModelDescription) -> list[str]:
    """One line for each setting in which two models differ; the context length is not compared."""
    lines = []
    for entry in dataclasses.fields(ModelDescription):
        first, second = getattr(a, entry.name), getattr(b, entry.name)
        close = isinstance(first, float) and isinstance(second, float) and math.isclose(first, second, rel_tol=1e-6)
        if entry.name != "max_position_embeddings" and first != second and not close:
            first, second = getattr(first, "name", first), getattr(second, "name", second)
            lines.append(f"{entry.name}: {first} in A, {second} in B")
    return lines


def narrower(a: CheckpointSource, b: CheckpointSource) -> torch.dtype:
    """The narrower of two checkpoints' dtypes, judged by their embeddings."""
    types = (a.dtype(a.specs[0]), b.dtype(b.specs[0]))
    return min(types, key=lambda dtype: dtype.itemsize)


def compare(a: CheckpointSource, b: CheckpointSource, progress: Callable[[int], object] = lambda _: None) -> Ledger:
    """Compare all tensors, reading one parameter at a time."""
    ledger = Ledger()
    names_b = set(b.names)
    ledger.only_a = [name for name in a.names if name not in names_b]
    ledger.only_b = sorted(names_b - set(a.names))
    for name in a.names:
        if name in names_b:
            first, second = a.hf_tensor(name), b.hf_tensor(name)
            _enter(ledger, name, first, second)
            progress(first.nbytes)
    return ledger


def _enter(ledger: Ledger, name: str, a: torch.Tensor, b: torch.Tensor) -> None:
    if a.shape != b.shape:
        what = f"shape {tuple(a.shape)} in A, {tuple(b.shape)} in B"
        ledger.differences.append(Difference(name=name, what=what))
    elif a.dtype == b.dtype and torch.equal(a, b):
        ledger.equal += 1
    elif a.dtype != b.dtype and _equal_when_rounded(a, b):
        ledger.rounded += 1
    else:
        gap = (a.double() - b.double()).norm()
        ledger.differences.append(
            Difference(
                name=name,
                what="values" if a.dtype == b.dtype else f"values, {a.dtype} in A and {b.dtype} in B",
                largest=(a.double() - b.double()).abs().max().item(),
                relative=(gap / a.double().norm().clamp(min=torch.finfo(torch.float64).tiny)).item(),
            )
        )


def _equal_when_rounded(a: torch.Tensor, b: torch.Tensor) -> bool:
    wide, narrow = (a, b) if a.dtype.itemsize > b.dtype.itemsize else (b, a)
    return torch.equal(wide.to(narrow.dtype), narrow)


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitGap:
    """How far two models' logits are apart on a few prompts."""

    largest: float  # largest absolute difference of logits
    scale: float  # largest logit of A

    @property
    def same(self) -> bool:
        """Whether the order of floating-point operations can explain the difference."""
        return self.largest <= LOGIT_TOLERANCE * self.scale

    def line(self) -> str:
        """The gap as a readable line."""
        return f"logits: largest difference {self.largest:.3g}, largest logit {self.scale:.3g}"


def compare_logits(a: CheckpointSource, b: CheckpointSource, *, dtype: torch.dtype | None = None) -> LogitGap:
    """Run both, one after the other, in fp32 on the same random prompts.

    Args:
        a, b: checkpoints with the same vocabulary.
        dtype: weights are rounded to it first; give it if one checkpoint was converted to it.
    """
    if a.description.vocab_size != b.description.vocab_size:
        raise CheckpointError(
            f"The vocabularies have {a.description.vocab_size} and {b.description.vocab_size} tokens; "
            "logits cannot be compared."
        )
    generator = torch.Generator().manual_seed(20_25)
    tokens = torch.randint(0, a.description.vocab_size, (_PROMPTS, _LENGTH), generator=generator)
    tokens[0, 0], tokens[0, 1] = 0, a.description.vocab_size - 1
    first = logits(a, tokens, dtype)
    second = logits(b, tokens, dtype)
    return LogitGap(largest=(first - second).abs().max().item(), scale=first.abs().max().item())


@torch.no_grad()
def logits(source: CheckpointSource, tokens: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """`[prompts, length, vocabulary]`, fp32, computed by transformers or by Megatron, according to the kind of
    checkpoint."""
    if isinstance(source, MegatronSource):
        return _megatron_logits(source, tokens, dtype)
    assert isinstance(source, HuggingFaceSource)
    return _transformers_logits(source.path, tokens, dtype)


def _transformers_logits(folder: Path, tokens: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", local_files_only=True
    ).eval()
    _round(model, dtype)
    return model(tokens).logits.float()


def _megatron_logits(source: MegatronSource, tokens: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    model = source.load_model()
    _round(model, dtype)
    batch, length = tokens.shape
    causal = torch.triu(torch.ones(1, 1, length, length, dtype=torch.bool), 1)
    output = model(tokens, torch.arange(length).expand(batch, length), causal)
    return output[..., : source.description.vocab_size].float()


def _round(model: Any, dtype: torch.dtype | None) -> None:
    for parameter in model.parameters() if dtype is not None else ():
        parameter.copy_(parameter.to(dtype))
