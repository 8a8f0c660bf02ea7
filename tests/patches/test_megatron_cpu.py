"""The CPU patches: what they do, and that each is still needed."""

import subprocess
import sys
import textwrap
from collections.abc import Sequence

import pytest
import torch

from megatron_vcpo.patches import megatron_cpu, modelopt_without_vllm
from tests.oracle.forked import forked_python

modelopt_without_vllm.apply()
megatron_cpu.install()
cpu_only = pytest.mark.skipif(not megatron_cpu.active(), reason="CUDA works here: the patches are not installed")


def run(code: str, python: Sequence[str] = (sys.executable,)) -> subprocess.CompletedProcess:
    return subprocess.run([*python, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=900)


@cpu_only
def test_cuda_factories_and_methods_land_on_the_cpu():
    assert torch.zeros(2, device="cuda").device.type == "cpu"
    assert torch.empty_like(torch.zeros(2), device=torch.device("cuda", 0)).device.type == "cpu"
    assert torch.zeros(2).to("cuda").device.type == "cpu"
    assert torch.zeros(2).new_ones(3, device=torch.cuda.current_device()).device.type == "cpu"
    assert torch.zeros(2).cuda().device.type == "cpu"
    assert not torch.cuda.is_available()


@cpu_only
@pytest.mark.slow
def test_megatron_still_needs_the_cuda_alias():
    """When this fails, Megatron-Core builds a model without CUDA by itself: patches/torch_cuda_alias.py can shrink."""
    done = run(
        """
        import torch
        from megatron.core import parallel_state, tensor_parallel
        import torch.distributed as dist, tempfile, os
        dist.init_process_group("gloo", init_method="file://" + tempfile.mktemp(), rank=0, world_size=1)
        parallel_state.initialize_model_parallel()
        tensor_parallel.model_parallel_cuda_manual_seed(1)
        """
    )
    assert done.returncode != 0
    assert "CUDA" in done.stderr or "NVIDIA" in done.stderr


@cpu_only
def test_megatron_training_still_refuses_to_start_without_cuda():
    """When this fails, patches/training_without_cuda.py may no longer be needed."""
    import inspect

    from megatron.training import initialize

    source = inspect.getsource(getattr(initialize.initialize_megatron, "func", initialize.initialize_megatron))
    assert "allow_no_cuda" in source
    assert "Megatron requires CUDA" in source


@cpu_only
@pytest.mark.slow
def test_stock_norm_still_refuses_sequence_parallelism():
    """When this fails, patches/torch_norm_sequence_parallel.py may no longer be needed."""
    done = run(
        """
        from megatron_vcpo.patches import megatron_cpu
        megatron_cpu.install()
        from megatron.core.transformer.torch_norm import WrappedTorchNorm
        from megatron.core.transformer.transformer_config import TransformerConfig
        config = TransformerConfig(num_layers=1, hidden_size=32, num_attention_heads=4, use_cpu_initialization=True,
            normalization="RMSNorm", tensor_model_parallel_size=2, sequence_parallel=True)
        WrappedTorchNorm(config, 32)
        """,
        forked_python(),
    )
    assert done.returncode != 0
    assert "sequence parallel" in done.stderr


@cpu_only
@pytest.mark.slow
def test_stock_dispatcher_helper_still_skips_host_tensors():
    """When this fails, patches/moe_host_splits.py may no longer be needed."""
    done = run(
        """
        from megatron_vcpo.patches import megatron_cpu
        megatron_cpu.install()
        import torch
        from megatron.core.transformer.moe import moe_utils
        print(type(moe_utils.maybe_move_tensor_to_cpu(torch.tensor([1, 2]), as_numpy=True)).__name__)
        """,
        forked_python(),
    )
    assert done.stdout.strip().endswith("Tensor"), done.stdout + done.stderr
