"""The frozen reference on plain modules."""

import pytest
import torch

from megatron_vcpo.mcore.reference import ReferencePolicy


class Router(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.arange(4.0))
        self.register_buffer("expert_bias", torch.tensor([0.5, -0.5]))
        self.register_buffer("local_tokens_per_expert", torch.zeros(2))


def test_weights_and_expert_biases_are_the_frozen_ones_within_and_the_current_ones_after():
    chunk = torch.nn.Sequential(Router())
    reference = ReferencePolicy([chunk])
    router = chunk[0]
    with torch.no_grad():
        router.weight.add_(1.0)
        router.expert_bias.add_(2.0)
        router.local_tokens_per_expert.add_(3.0)
    with reference.in_place_of([chunk]):
        assert router.weight.tolist() == [0.0, 1.0, 2.0, 3.0]
        assert router.expert_bias.tolist() == [0.5, -0.5]
        assert router.local_tokens_per_expert.tolist() == [3.0, 3.0]
    assert router.weight.tolist() == [1.0, 2.0, 3.0, 4.0]
    assert router.expert_bias.tolist() == [2.5, 1.5]


def test_the_current_weights_come_back_after_an_error():
    chunk = torch.nn.Sequential(Router())
    reference = ReferencePolicy([chunk])
    with torch.no_grad():
        chunk[0].weight.add_(1.0)
    with pytest.raises(RuntimeError, match="in the pass"), reference.in_place_of([chunk]):
        raise RuntimeError("in the pass")
    assert chunk[0].weight.tolist() == [1.0, 2.0, 3.0, 4.0]


def test_a_saved_reference_of_another_model_is_refused_by_name():
    reference = ReferencePolicy([torch.nn.Sequential(Router())])
    state = reference.state_dict()
    reference.load_state_dict(state)
    del state["0.0.expert_bias"]
    with pytest.raises(ValueError, match=r"0\.0\.expert_bias"):
        reference.load_state_dict(state)


def test_a_resumed_run_gets_the_reference_that_was_saved_not_its_own_weights(tmp_path):
    from megatron_vcpo.flow.resume import load_reference, save_reference

    chunk = torch.nn.Sequential(Router())
    save_reference(ReferencePolicy([chunk]), tmp_path / "rank.safetensors")
    router = chunk[0]
    with torch.no_grad():
        router.weight.add_(1.0)
        router.expert_bias.add_(2.0)
    resumed = ReferencePolicy([chunk])
    load_reference(resumed, tmp_path / "rank.safetensors")
    with resumed.in_place_of([chunk]):
        assert router.weight.tolist() == [0.0, 1.0, 2.0, 3.0]
        assert router.expert_bias.tolist() == [0.5, -0.5]
    assert router.weight.tolist() == [1.0, 2.0, 3.0, 4.0]


def test_a_damaged_or_foreign_reference_ends_a_resume_with_one_sentence(tmp_path):
    from megatron_vcpo.config import ConfigError
    from megatron_vcpo.flow.resume import load_reference, save_reference

    reference = ReferencePolicy([torch.nn.Sequential(Router())])
    path = tmp_path / "kl_reference" / "rank.safetensors"
    save_reference(reference, path)
    load_reference(reference, path)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ConfigError, match="is damaged or of another layout"):
        load_reference(reference, path)
    path.write_bytes(whole)
    with pytest.raises(ConfigError, match="is damaged or of another layout"):
        load_reference(ReferencePolicy([torch.nn.Linear(2, 2)]), path)
