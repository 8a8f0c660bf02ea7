"""Tied embeddings: one weight with two uses, whose gradients A (output layer) and E (embedding) add up.

||A + E||^2 = ||A||^2 + ||E||^2 + 2 <A, E>, and E is zero except in the rows of the trajectory's own words. So only
those rows of A are needed: one for each token, as many numbers as the embedding's gradient has.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from megatron_vcpo.mcore.energies.contributions import working

if TYPE_CHECKING:
    from megatron_vcpo.mcore.energies.collector import EnergyCollector, MicroBatchRows
    from megatron_vcpo.mcore.energies.rows import Rows


def output_part(
    collector: EnergyCollector, owners: MicroBatchRows, scored: Rows, x: Tensor, g: Tensor, *, first: int
) -> None:
    """Keep A's row of every token's own word.

    Args:
        collector: notified once all chunks of the output layer have arrived.
        owners: the micro-batch.
        scored: owners of the rows, which are all rows of the output layer or a chunk of them.
        x: [t, d] hidden states.
        g: [t, V / tp] gradient of the logits.
        first: this rank's first word.
    """
    owners.output_rows += len(x)
    rows, words = owners.rows, owners.tokens
    group = collector.layout.sharded.group
    if group is not None:
        some, every = scored.exchange(group), rows.exchange(group)
        x, g, words = some(x), some(g), every(words)
        scored, rows = some.rows, every.rows
    x, g = working(x, g)
    if owners.output_part is None:
        owners.output_part = x.new_zeros(len(rows.ids), x.size(1))
    spans = dict(scored.segments)
    for index, span in rows.segments:
        if index in spans:
            word = words[span] - first
            own = (word >= 0) & (word < g.size(1))
            columns = g[spans[index]][:, word.clamp(0, g.size(1) - 1)]
            owners.output_part[span] += (columns.t() @ x[spans[index]]) * own[:, None]
    if owners.output_rows == len(owners.rows.ids):
        collector.keep_tied(owners)


def embedding_part(collector: EnergyCollector, owners: MicroBatchRows, g: Tensor) -> None:
    """Keep the gradient of every token's embedding, [t, d]."""
    group = collector.layout.sharded.group
    owners.embedding_part = g if group is None else owners.rows.exchange(group)(g)
    collector.keep_tied(owners)
