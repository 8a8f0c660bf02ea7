"""The alltoall token dispatcher turns split sizes into host lists only `if tensor.is_cuda`, so it fails on CPU tensors.

Versions: megatron-core 0.16 to 0.19.2. Only installed on the CPU.
"""

from __future__ import annotations

from typing import Any

import torch

from megatron_vcpo.patches import torch_cuda_alias


def apply() -> None:
    """Make the helper return host arrays for CPU tensors too."""
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    def to_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.clone().numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    # The class creates it once, from the current torch.cuda.Stream, which vLLM replaces by one whose events are None.
    token_dispatcher.MoEAlltoAllTokenDispatcher.cuda_dtoh_stream = torch_cuda_alias.Stream()
    moe_utils.maybe_move_tensor_to_cpu = to_host
    if hasattr(token_dispatcher, "maybe_move_tensor_to_cpu"):
        token_dispatcher.maybe_move_tensor_to_cpu = to_host
