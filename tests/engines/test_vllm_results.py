"""What vLLM returns is checked before it becomes a result; no engine is started here."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from megatron_vcpo.data.digests import digest
from megatron_vcpo.engines.protocol import EngineError
from megatron_vcpo.engines.vllm.engine import VLLMEngine, VLLMSettings, _result
from megatron_vcpo.engines.vllm.weights import _Feed


def output(*, ids=(5, 6, 1), logprobs=(-0.5, -1.0, -0.1), sampled=None, reason="stop"):
    flat = SimpleNamespace(token_ids=list(ids if sampled is None else sampled), logprobs=list(logprobs))
    completion = SimpleNamespace(token_ids=list(ids), logprobs=flat, text="ab", finish_reason=reason)
    return SimpleNamespace(outputs=[completion])


def test_sound_response_becomes_a_result():
    result = _result(0, output(), 7)
    assert result.response_ids.dtype == np.int32
    assert result.logprobs.dtype == np.float32
    assert result.response_ids.tolist() == [5, 6, 1]
    np.testing.assert_allclose(result.logprobs, [-0.5, -1.0, -0.1])
    assert result.versions.tolist() == [7, 7, 7]
    assert not result.truncated
    assert _result(0, output(reason="length"), 7).truncated


def test_rounding_above_zero_is_taken_for_zero():
    assert _result(0, output(logprobs=(-0.5, 1e-6, 0.0)), 7).logprobs.max() == 0.0


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"logprobs": (-0.5, float("nan"), -0.1)}, "request 4 the log-prob nan at response token 1"),
        ({"logprobs": (float("-inf"), -1.0, -0.1)}, "request 4 the log-prob -inf at response token 0"),
        ({"logprobs": (-0.5, -1.0, 0.3)}, "log-prob 0.3.* at response token 2"),
        ({"sampled": (5, 6)}, "2 log-probs for the 3 tokens of request 4"),
        ({"sampled": (5, 7, 1)}, "log-probs for the 3 tokens of request 4"),
        ({"reason": "abort"}, "ended request 4 with reason 'abort'"),
    ],
)
def test_unsound_response_is_an_error_that_names_the_request(changes, said):
    with pytest.raises(EngineError, match=said):
        _result(4, output(**changes), 7)


def test_folder_without_a_model_is_refused_before_vllm_is_imported(tmp_path):
    with pytest.raises(EngineError, match=r"has no config\.json"):
        VLLMEngine(VLLMSettings(model_dir=str(tmp_path), dtype="float32", max_model_len=8))


def feed_of(*items, refuse_nan=True, digests=None):
    return _Feed(iter(items), refuse_nan=refuse_nan, digests=digests)


def test_a_feed_notes_what_came_and_how_far_it_got():
    digests: dict[str, int] = {}
    feed = feed_of(("a", torch.zeros(3)), ("b", torch.ones(3)), digests=digests)
    assert [(name, tensor.tolist()) for name, tensor in feed] == [("a", [0] * 3), ("b", [1] * 3)]
    assert (feed.last, feed.exhausted, feed.producer_failed) == ("b", True, False)
    assert digests == {"a": digest(torch.zeros(3)), "b": digest(torch.ones(3))}


@pytest.mark.parametrize(
    ("second", "words"), [(("a", torch.ones(2)), "twice"), (("b", torch.tensor([1.0, torch.nan])), "NaN")]
)
def test_a_feed_refuses_a_tensor_that_comes_twice_or_holds_nan(second, words):
    feed = feed_of(("a", torch.zeros(2)), second)
    with pytest.raises(ValueError, match=words):
        list(feed)
    assert (feed.exhausted, feed.producer_failed) == (False, False)


def test_a_feed_tells_a_failure_of_the_producer_from_one_of_the_engine():
    def producer():
        yield "a", torch.zeros(2)
        raise RuntimeError("lost")

    feed = _Feed(producer(), refuse_nan=True, digests=None)
    with pytest.raises(RuntimeError, match="lost"):
        list(feed)
    assert (feed.last, feed.producer_failed) == ("a", True)
