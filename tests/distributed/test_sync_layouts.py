"""Load and stream under tensor, pipeline, virtual pipeline and expert parallelism; one launch for all layouts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.oracle.model_pairs import VOCAB, save_hf_model
from tests.oracle.torchrun import torchrun

_WORKER = Path(__file__).with_name("sync_worker.py")


def write_checkpoint(root: Path, folder: str, *, tied: bool, **changes: int) -> None:
    """A checkpoint with the logits that transformers computes from it."""
    target = root / f"{folder}-{'tied' if tied else 'untied'}"
    model = save_hf_model(target, folder.split("-")[0], tied=tied, **changes)
    tokens = torch.randint(0, VOCAB, (2, 16), generator=torch.Generator().manual_seed(5))
    logits = model(tokens).logits
    logits.square().mean().backward()
    probe = {"tokens": tokens, "logits": logits.detach().contiguous()}
    probe |= {name: p.grad for name, p in model.named_parameters() if name.endswith("kv_a_proj_with_mqa.weight")}
    save_file(probe, target / "probe.safetensors")


@pytest.mark.distributed
def test_every_layout_computes_the_same_and_streams_the_checkpoint_back(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "llama", tied=True)
    write_checkpoint(tmp_path, "qwen2", tied=False)
    write_checkpoint(tmp_path, "llama-one_group", tied=False, num_key_value_heads=1)
    write_checkpoint(tmp_path, "qwen3-four_layers", tied=True, num_hidden_layers=4)
    write_checkpoint(tmp_path, "qwen3_moe", tied=False)
    write_checkpoint(tmp_path, "mixtral", tied=False)
    write_checkpoint(tmp_path, "mixtral", tied=True)
    write_checkpoint(tmp_path, "deepseek_v2", tied=False)
    write_checkpoint(tmp_path, "deepseek_v3", tied=False)
    write_checkpoint(tmp_path, "gpt_oss", tied=False)
    write_checkpoint(tmp_path, "deepseek_v3-four_layers", tied=False, num_hidden_layers=4)
    torchrun(_WORKER, str(tmp_path), processes=2, passed="all layouts passed")
