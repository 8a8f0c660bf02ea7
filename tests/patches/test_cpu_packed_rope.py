"""The packed rotary embedding against the stock one."""

import inspect
import subprocess
import textwrap

import pytest
import torch

from tests.oracle.forked import forked_python
from tests.oracle.single_process import single_process_megatron


@pytest.mark.parametrize("lengths", [[5], [3, 9, 1, 4], [2] * 40])
def test_rotation_is_bit_identical_to_the_loop_over_sequences(lengths):
    with single_process_megatron() as groups:
        from megatron.core.models.common.embeddings import rope_utils

        patched = rope_utils._apply_rotary_pos_emb_thd
        stock = inspect.getclosurevars(patched).nonlocals["original"]
        torch.manual_seed(0)
        tokens = torch.randn(sum(lengths), 4, 8, requires_grad=True)
        cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
        freqs = torch.randn(max(lengths) + 2, 1, 1, 8)
        results = []
        for function in (patched, stock):
            out = function(tokens, cu_seqlens, freqs, cp_group=groups.cp)
            (gradient,) = torch.autograd.grad((out * torch.arange(out.numel()).view_as(out)).sum(), tokens)
            results.append((out, gradient))
        assert torch.equal(results[0][0], results[1][0])
        assert torch.equal(results[0][1], results[1][1])


@pytest.mark.slow
def test_stock_rope_still_loops():
    """When this fails, patches/cpu_packed_rope.py may no longer be needed."""
    code = """
        import inspect
        from megatron_vcpo.patches import megatron_cpu
        megatron_cpu.install()
        from megatron.core.models.common.embeddings import rope_utils
        print("for x in sequence_splits" in inspect.getsource(rope_utils._apply_rotary_pos_emb_thd))
    """
    done = subprocess.run([*forked_python(), "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=900)
    assert done.stdout.strip().endswith("True"), done.stdout + done.stderr
