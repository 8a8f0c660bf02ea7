"""A process of its own: Megatron publishes random models of one family to vLLM, and both score the same tokens."""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron_vcpo.checkpoint.hf_config import write_model_dir
from megatron_vcpo.checkpoint.model_files import read_tokenizer_folder
from megatron_vcpo.config import SyncConfig
from megatron_vcpo.engines.protocol import GenerationRequest, Sampling
from megatron_vcpo.engines.vllm.engine import VLLMEngine, VLLMSettings
from megatron_vcpo.models.description import ModelFacts, describe_megatron
from megatron_vcpo.sync.errors import SyncError
from megatron_vcpo.sync.synchronizer import WeightSynchronizer
from tests.oracle.logit_probe import logit_probe
from tests.oracle.model_pairs import VOCAB, gpt_models, transformer_config
from tests.oracle.single_process import single_process_megatron
from tests.oracle.tiny_models import EOS, character_tokenizer

ENDS = [EOS, 40]

_SOAKED = ("qwen2", "qwen3_moe")
_TIED = ("llama", "qwen2")
# vLLM's attention on a CPU takes heads of 32 dimensions or more, and one size of latents.
_LATENT = {"kv_lora_rank": 512, "qk_pos_emb_head_dim": 64, "qk_head_dim": 32, "v_head_dim": 32}
_SIZES: dict[str, dict[str, Any]] = {
    "qwen2": {"kv_channels": 32, "hidden_size": 128},  # it has no head_dim of its own
    "deepseek_v2": _LATENT,
    "deepseek_v3": _LATENT,
}


@torch.no_grad()
def disturb(model: Any) -> None:
    """Another model: every parameter moves."""
    biases = [buffer for name, buffer in model.named_buffers() if name.endswith("expert_bias")]
    for parameter in [*model.parameters(), *biases]:
        parameter.add_(torch.randn_like(parameter) * 0.1)


def soak(publisher: WeightSynchronizer, probe: Callable[[], Any]) -> None:
    """The same weights 300 times: the difference stays what it is, and so does the memory."""
    differences = []
    resident = []
    for version in range(3, 303):
        publisher.publish(version)
        if version % 50 == 2:
            differences.append(probe().max)
            gc.collect()
            resident.append(int(Path("/proc/self/statm").read_text().split()[1]) * 4096)
    print(f"300 syncs: differences {differences}, resident MB {[round(r / 1e6, 1) for r in resident]}", flush=True)
    assert len(set(differences)) == 1
    assert resident[-1] - resident[0] < 4e6


def check_ends(engine: VLLMEngine) -> None:
    """Both ends that the engine's folder names end a response, though no request names them."""
    requests = [GenerationRequest(prompt_ids=[20, 14, 21], seed=seed) for seed in range(64)]
    results = engine.generate(requests, Sampling(max_tokens=90), progress=False)
    assert not [r for r in results if set(ENDS) & set(r.response_ids[:-1].tolist())]
    ended = [int(r.response_ids[-1]) for r in results if not r.truncated]
    assert set(ended) == set(ENDS), ended


def main(name: str, folder: Path) -> None:
    config = transformer_config(name, **_SIZES.get(name, {"kv_channels": 32}))
    tied = name in _TIED
    facts = ModelFacts(
        vocab_size=VOCAB,
        max_position_embeddings=128,
        rotary_base=5000,
        tied_embeddings=tied,
        position_embedding_type="yarn" if name == "gpt_oss" else "rope",
    )
    character_tokenizer().save_pretrained(folder / "tokenizer")
    (folder / "tokenizer" / "generation_config.json").write_text(json.dumps({"eos_token_id": ENDS}))
    files = read_tokenizer_folder(folder / "tokenizer")
    write_model_dir(folder / "engine", config, facts, files, dtype=torch.float32)
    with single_process_megatron() as groups:
        (model,) = gpt_models(config, tied=tied)
        disturb(model)
        engine = VLLMEngine(
            VLLMSettings(model_dir=str(folder / "engine"), dtype="float32", max_model_len=96, kv_cache_bytes=64 << 20)
        )
        about = describe_megatron(config, facts)
        publisher = WeightSynchronizer(
            [model], about.family, about.shape(128), groups, engine, SyncConfig(), dtype=torch.float32
        )

        @torch.no_grad()
        def score(sequences: Sequence[Sequence[int]], prompt_lengths: Sequence[int]) -> list[Any]:
            scores = []
            for ids, start in zip(sequences, prompt_lengths):
                tokens, length = torch.tensor([ids]), len(ids)
                causal = torch.triu(torch.ones(1, 1, length, length, dtype=torch.bool), 1)
                logits = model(tokens, torch.arange(length)[None], causal)[0, :-1, :VOCAB]
                scores.append(logits.log_softmax(-1).gather(1, tokens[0, 1:, None])[start - 1 :, 0].numpy())
            return scores

        sequences = [np.random.default_rng(seed).integers(0, VOCAB, 60).tolist() for seed in range(4)]
        for version in range(3):
            report = publisher.publish(version, verify=version == 1)
            assert report.version == engine.version == version
            assert (report.copied > 0) == (version > 0)
            result = logit_probe(engine, score, sequences, [5] * 4, dtype=torch.float32, tolerance=1e-5)
            print(f"{name} version {version}: {result}, {report.copied} of {report.tensors} copied", flush=True)
            assert not [n for n in report.unreadable if ".mlp.experts." not in n or "bias" in n], report.unreadable
            disturb(model)
        check_ends(engine)
        if name in _SOAKED:
            probe = (engine, score, sequences, [5] * 4)
            soak(publisher, lambda: logit_probe(*probe, dtype=torch.float32, tolerance=1e-5))
            disturb(model)
        try:
            logit_probe(engine, score, sequences, [5] * 4, dtype=torch.float32)
        except SyncError as error:
            assert "another model" in str(error)  # noqa: PT017 - not a pytest test
            print("stale weights were noticed", flush=True)
        engine.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
