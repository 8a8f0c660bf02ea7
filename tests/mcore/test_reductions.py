"""What ranks must agree on; a second rank is played by the collective."""

import pytest
import torch
import torch.distributed as dist

from megatron_vcpo.mcore.reductions import RankDisagreement, agree

CPU = torch.device("cpu")


@pytest.fixture
def beside(monkeypatch):
    """Let the one collective be shared with a rank that holds the given value and flag."""

    def other_rank(value, flag):
        def maximum(row, op):
            assert op == dist.ReduceOp.MAX
            row.copy_(torch.maximum(row, torch.tensor([value, -value, float(flag)], dtype=row.dtype)))

        monkeypatch.setattr(dist, "is_initialized", lambda: True)
        monkeypatch.setattr(dist, "get_world_size", lambda: 2)
        monkeypatch.setattr(dist, "get_rank", lambda: 0)
        monkeypatch.setattr(dist, "all_reduce", maximum)

    return other_rank


def test_one_process_agrees_with_itself():
    assert agree(0.5, True, what="It", device=CPU)
    assert not agree(0.5, False, what="It", device=CPU)


@pytest.mark.parametrize("other", [0.5 + 2**-53, 0.5 - 2**-53, 0.0])
def test_a_value_that_differs_in_its_last_bit_is_refused_with_both(beside, other):
    beside(other, False)
    with pytest.raises(RankDisagreement, match=r"The rate differs between ranks .* rank 0 has 0\.5\); stop the run"):
        agree(0.5, False, what="The rate", device=CPU)


def test_a_flag_of_any_rank_is_everyones(beside):
    beside(0.5, True)
    assert agree(0.5, False, what="It", device=CPU)
    beside(0.5, False)
    assert agree(0.5, True, what="It", device=CPU)
    assert not agree(0.5, False, what="It", device=CPU)
