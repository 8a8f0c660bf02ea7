"""One micro-batch through one chunk of Megatron's model."""

from __future__ import annotations

from typing import Any

from megatron_vcpo.mcore.logprobs import OutputContext, output_processor
from megatron_vcpo.mcore.packing import MicroBatch


def packed_seq_params(micro: MicroBatch) -> Any:
    """Megatron-Core's PackedSeqParams for the sequences of a micro-batch; routes to replay are attached to it later."""
    from megatron.core.packed_seq_params import PackedSeqParams

    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=micro.cu_seqlens,
        cu_seqlens_kv=micro.cu_seqlens,
        max_seqlen_q=micro.max_seqlen,
        max_seqlen_kv=micro.max_seqlen,
    )


def token_statistics(model: Any, micro: MicroBatch, packed: Any, context: OutputContext) -> Any:
    """Log-probs, energies and entropy of a micro-batch's tokens on the last pipeline stage; hidden states on others.

    Args:
        model: one of Megatron's model chunks.
        micro: the micro-batch.
        packed: its `packed_seq_params`.
        context: what the last stage's output processor needs.

    Returns:
        {'logprobs', 'energy', 'entropy'} of [T] tensors; on other stages, the input of the next one.
    """
    return model(
        micro.tokens,
        micro.position_ids,
        None,
        labels=micro.labels,
        packed_seq_params=packed,
        output_processor=output_processor,
        output_processor_context=context,
    )
