"""A converted checkpoint loads in training on another layout, and what training then saves converts back.

With a learning rate of 1e-30 a step changes no bit, so that every value has to come back as it was.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from examples.char_tokenizer import write_char_tokenizer
from megatron_vcpo.checkpoint.convert.compare_files import file_differences
from megatron_vcpo.checkpoint.convert.source import MegatronSource
from megatron_vcpo.checkpoint.convert.to_hf import convert_to_hf
from megatron_vcpo.checkpoint.convert.to_megatron import ConversionOptions, convert_to_megatron
from megatron_vcpo.checkpoint.model_files import read_model_folder
from megatron_vcpo.checkpoint.torch_dist import TorchDistFolder
from tests.oracle.forked import forked_python
from tests.oracle.model_pairs import save_hf_model
from tests.oracle.single_process import single_process_megatron

pytestmark = pytest.mark.distributed
ROOT = Path(__file__).parents[2]
VOCAB = 101  # the tokenizer's 99 fit
TRAIN = (
    *("--rollout-environment", "sort_digits", "--rollout-max-response-length", "8", "--seq-length", "64"),
    *("--rollout-prompts-per-step", "8", "--rollout-responses-per-prompt", "1", "--vcpo-tokens-per-micro-batch", "256"),
    *("--train-iters", "1", "--lr", "1e-30", "--lr-decay-style", "constant", "--save-interval", "1"),
    "--use-distributed-optimizer",
)


def train(folder: Path, *flags: str) -> None:
    """One supervised step on two processes with the flags that the converter wrote; saves to `folder`/trained."""
    arrays = '"${MODEL_ARGS[@]}" "${LOAD_ARGS[@]}"'
    launch = "-m torch.distributed.run --standalone --nproc-per-node 2 -m megatron_vcpo.supervised"
    python = shlex.join(forked_python())
    script = f'source "{folder}/megatron/megatron_flags.sh"; {python} -W ignore {launch} {arrays} "$@"'
    words = [*TRAIN, "--rollout-tokenizer", str(folder / "tokenizer"), "--save", str(folder / "trained"), *flags]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = ["bash", "-euc", script, "train", *words]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900, check=False)
    if done.returncode:
        pytest.fail(f"{' '.join(words)}\n{done.stdout[-2000:]}\n{done.stderr[-5000:]}")
    assert "loading release distributed checkpoint" in done.stdout


@pytest.mark.parametrize(
    ("name", "tied", "layers", "flags"),
    [
        (
            "llama",
            True,
            4,
            "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2",
        ),
        (
            "qwen3_moe",
            False,
            2,
            "--tensor-model-parallel-size 2 --sequence-parallel --expert-model-parallel-size 2 "
            "--expert-tensor-parallel-size 1 --padded-vocab-size 256",
        ),
    ],
    ids=["tied embeddings on interleaved stages", "experts and padded vocabulary over tensor ranks"],
)
def test_a_converted_checkpoint_is_trained_and_comes_back(
    name: str, tied: bool, layers: int, flags: str, tmp_path: Path
) -> None:
    changes: dict[str, Any] = {"num_hidden_layers": layers}
    if name == "qwen3_moe":
        changes["mlp_only_layers"] = []
    save_hf_model(tmp_path / "hf", name, tied=tied, **changes)
    (tmp_path / "hf" / "generation_config.json").write_text('{"eos_token_id": [2, 7]}')
    write_char_tokenizer(tmp_path / "tokenizer")
    options = ConversionOptions(shard_bytes=20_000)
    with single_process_megatron():
        convert_to_megatron(tmp_path / "hf", tmp_path / "megatron", options).folder.commit()
        train(tmp_path, *flags.split())
        trained = TorchDistFolder(tmp_path / "trained")
        assert trained.path.name == "iter_0000001"
        assert trained.tensors["embedding.word_embeddings.weight"].size[0] == (256 if "256" in flags else 128)
        source = MegatronSource(tmp_path / "trained")
        convert_to_hf(source, tmp_path / "back", options).folder.commit()
    hf, back = read_model_folder(tmp_path / "hf"), read_model_folder(tmp_path / "back")
    assert file_differences(hf.with_tokenizer(tmp_path / "tokenizer"), back) == []
    assert back.end_ids == [2, 7]
    before = load_file(tmp_path / "hf" / "model.safetensors")
    index = json.loads((tmp_path / "back" / "model.safetensors.index.json").read_text())["weight_map"]
    assert index.keys() == before.keys()
    for file in set(index.values()):
        for key, tensor in load_file(tmp_path / "back" / file).items():
            assert torch.equal(tensor, before[key]), key
