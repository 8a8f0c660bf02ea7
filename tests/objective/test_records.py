"""A user's own loss, found by its import path."""

import pytest
import torch

from megatron_vcpo.config import ConfigError, VCPOConfig
from megatron_vcpo.objective import LossInputs, LossOutputs, load_loss, vcpo_loss
from tests.oracle.estimator import Settings
from tests.oracle.minibatches import pack, random_samples

OWN_LOSS = '''
"""REINFORCE in ten lines, as a user would write it."""

import torch

from megatron_vcpo.objective import LossInputs, LossOutputs, segment_ids, spread


def reinforce(inputs: LossInputs) -> LossOutputs:
    ids = segment_ids(inputs.cu_seqlens, inputs.mask.numel())
    logprobs = torch.where(inputs.mask, inputs.policy_logprobs, 0.0)
    loss = -(spread(inputs.rewards, ids) * logprobs).sum() / inputs.num_trajectories
    return LossOutputs(loss=loss, metrics={"reward": torch.stack([inputs.rewards.sum(), torch.tensor(1.0)])})


CONSTANT = 3
'''


@pytest.fixture
def own_module(tmp_path, monkeypatch):
    (tmp_path / "my_losses.py").write_text(OWN_LOSS)
    (tmp_path / "my_broken_losses.py").write_text("def loss(:\n")
    (tmp_path / "my_needy_losses.py").write_text("import a_package_that_nobody_has\n")
    monkeypatch.syspath_prepend(tmp_path)


def test_a_users_loss_plugs_in_by_import_path_with_the_same_types(own_module):
    loss = load_loss("my_losses:reinforce")
    samples = random_samples(40)
    outputs = loss(pack(samples, Settings()))
    assert isinstance(outputs, LossOutputs)
    expected = -sum(s.reward * s.policy.sum() for s in samples) / len(samples)
    assert outputs.loss.item() == pytest.approx(expected)
    outputs.loss.backward()


def test_the_default_path_is_the_built_in_loss():
    assert load_loss(VCPOConfig().loss) is vcpo_loss


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("my_losses", "module:function"),
        (":reinforce", "module:function"),
        ("my_losses:", "module:function"),
        ("my_losses:nothing", "no function 'nothing'"),
        ("my_losses:CONSTANT", "no function 'CONSTANT'"),
        ("no_such_module_anywhere:loss", "cannot import"),
        ("my_broken_losses:loss", "cannot import"),
        ("my_needy_losses:loss", "a_package_that_nobody_has"),
    ],
)
def test_a_path_that_does_not_work_is_one_sentence_naming_the_flag(own_module, path, reason):
    with pytest.raises(ConfigError, match=reason) as error:
        load_loss(path)
    assert "--vcpo-loss" in str(error.value)


def test_records_are_frozen_and_keyword_only():
    inputs = pack(random_samples(41), Settings())
    with pytest.raises(AttributeError):
        inputs.rewards = torch.zeros(1)
    with pytest.raises(TypeError):
        LossInputs(torch.zeros(1))


def test_the_example_of_the_docstring_works():
    p = torch.randn(5, requires_grad=True)
    inputs = LossInputs(
        policy_logprobs=p,
        behavior_logprobs=p.detach(),
        mask=torch.ones(5, dtype=torch.bool),
        cu_seqlens=torch.tensor([0, 3, 5]),
        rewards=torch.tensor([1.0, 0.0]),
        group_ids=torch.tensor([7, 7]),
        advantage_scales=torch.ones(2),
        num_trajectories=2.0,
        num_tokens=5.0,
        max_response_length=8,
        config=VCPOConfig(energy="length"),
    )
    vcpo_loss(inputs).loss.backward()
    assert torch.isfinite(p.grad).all()
