"""EnergyCollector: watches every use of every parameter during a backward pass and adds up the energies."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_vcpo.mcore.energies.contributions import Contribution, OpenProducts, Products, working
from megatron_vcpo.mcore.energies.layout import EnergyLayout
from megatron_vcpo.mcore.energies.rows import Rows
from megatron_vcpo.mcore.packing import MicroBatch
from megatron_vcpo.mcore.reductions import group_size

KINDS = ("linear", "expert", "router", "norm", "bias", "embedding", "output")
Sink = Callable[[torch.nn.Parameter, Contribution], None]


@dataclass(eq=False, kw_only=True)
class MicroBatchRows:
    """Owners of one micro-batch's rows; kept on its packed_seq_params, where a recomputed layer finds them again."""

    rows: Rows
    scored: Rows  # only rows that the loss reads; other rows of the output layer have no gradient
    tokens: Tensor  # [t] int64
    # With tied embeddings, the two parts of the cross term 2 <output gradient, embedding gradient>: the output
    # gradient's row for each token's own word, and the embedding's gradient; [t', d] each, for rows this rank owns.
    output_part: Tensor | None = None
    embedding_part: Tensor | None = None
    output_rows: int = 0  # rows of the output layer whose gradient has arrived
    open: OpenProducts = field(default_factory=OpenProducts)  # of an output layer that runs chunk by chunk
    _scored_from: int = 0  # first row of the next chunk, on each rank

    def next_scored(self, count: int, ranks: int) -> tuple[Rows, Rows | None]:
        """Owners of the output layer's next `count` rows and, if these are only a chunk, of all its rows (else None).

        Args:
            count: rows after the gather over `ranks` sequence-parallel ranks.
            ranks: number of those ranks; a chunk holds rows of each.
        """
        if count == len(self.scored.ids):
            return self.scored, None
        start, self._scored_from = self._scored_from, self._scored_from + count // ranks
        return self.scored.chunk(start, self._scored_from, ranks), self.scored

    @staticmethod
    def of(micro: MicroBatch, cp_rank: int = 0) -> MicroBatchRows:
        """From a packed micro-batch, for the rows of this context-parallel rank; copies its mask to the host once."""
        device = micro.tokens.device
        ends = micro.cu_seqlens.tolist()
        ids = np.full(micro.num_rows, -1, np.int64)
        for position, index in enumerate(micro.indices):
            ids[ends[position] : ends[position + 1]] = index
        scored = np.where(micro.response_mask.cpu().numpy(), ids, -1)
        if micro.context_rows is not None:
            own = micro.context_rows[cp_rank].cpu().numpy()
            ids, scored = ids[own], scored[own]
        members = np.array(sorted(micro.indices), np.int64)
        return MicroBatchRows(
            rows=Rows(ids=ids, device=device, members=members),
            scored=Rows(ids=scored, device=device, members=members),
            tokens=micro.tokens.view(-1),
        )


class EnergyCollector:
    """Energies of one minibatch by kind of parameter, while its backward passes run.

    Example:
        >>> collector = EnergyCollector(layout, num_trajectories=8, trainable=parameters, tied=False, device=device)
        >>> with attachment.active(collector), collector.micro_batch(owners):
        ...     logprobs = model(...)
        >>> logprobs.sum().backward()
        >>> energies = collector.reduce().sum(0)
    """

    def __init__(
        self,
        layout: EnergyLayout,
        *,
        num_trajectories: int,
        trainable: frozenset[int],
        tied: bool,
        device: torch.device,
        sink: Sink | None = None,
        products: Products = Products.NONE,
    ) -> None:
        """Args:
        layout: process groups.
        num_trajectories: N of the minibatch, over all ranks.
        trainable: id() of every parameter that counts.
        tied: the output layer's weight is the embedding's.
        device: of the energies.
        sink: called with every contribution, by methods that form weight gradients from them.
        products: whether the sink uses the trajectories' own weight gradients.
        """
        self.layout = layout
        self.trainable = trainable
        self.tied = tied
        self.sink = sink
        self.products = products
        self.table = torch.zeros(len(KINDS), num_trajectories, dtype=torch.float64, device=device)
        self.current: MicroBatchRows | None = None
        self.dispatched: list[Rows] = []  # owners of each local expert's rows, in the layer that is running
        self._stack: list[tuple[MicroBatchRows | None, Rows | None]] = []
        self._rows: Rows | None = None
        self._tied_parts: list[MicroBatchRows] = []

    # ------------------------------------------------------------------ whose rows

    @contextmanager
    def micro_batch(self, owners: MicroBatchRows) -> Iterator[None]:
        """Attribute everything that runs outside of layers to this micro-batch."""
        self.enter(owners, owners.rows)
        try:
            yield
        finally:
            self.leave()

    def enter(self, owners: MicroBatchRows | None, rows: Rows | None) -> None:
        """Until leave(), rows belong to `rows` of the micro-batch `owners`."""
        self._stack.append((self.current, self._rows))
        self.current, self._rows = owners, rows

    def leave(self) -> None:
        """Undo the last enter()."""
        self.current, self._rows = self._stack.pop()

    def rows(self, count: int) -> Rows:
        """Owners of `count` rows: all of the current scope, or this rank's sequence-parallel slice of them."""
        assert self._rows is not None
        whole = len(self._rows.ids)
        if count == whole:
            return self._rows
        if count * self.layout.tp_size == whole:
            return self._rows.part(self.layout.tp_rank, self.layout.tp_size)
        raise RuntimeError(f"A layer has {count} rows where its micro-batch has {whole}: exact energies cannot follow.")

    # ------------------------------------------------------------------ contributions

    def listens(self, out: Tensor, param: Any) -> bool:
        """Whether `param` is measured and `out` will receive a gradient."""
        return id(param) in self.trainable and self._rows is not None and out.requires_grad

    def watch(
        self, out: Tensor, param: torch.nn.Parameter | None, kind: str, make: Callable[[Tensor], Contribution]
    ) -> None:
        """Once the gradient of `out` is known, add the contribution that `make` forms from it."""
        if param is None or not self.listens(out, param):
            return

        pending = [make]  # frees the rows that `make` holds as soon as it is used, however long the graph lives

        def hook(gradient: Tensor) -> None:
            contribution = pending.pop()(gradient)
            contribution.add_energies(self.table[KINDS.index(kind)], self.products)
            if self.sink is not None:
                self.sink(param, contribution)

        out.register_hook(hook)

    def keep_tied(self, owners: MicroBatchRows) -> None:
        """Call when one part of the cross term is known; the term is added once both are, here or in reduce()."""
        if owners.output_part is not None and owners.embedding_part is not None:
            self._add_cross_term(owners)
        elif owners not in self._tied_parts and group_size(self.layout.pp) > 1:
            self._tied_parts.append(owners)

    def _add_cross_term(self, owners: MicroBatchRows) -> None:
        output, embedding = owners.output_part, owners.embedding_part
        assert output is not None
        assert embedding is not None
        output, embedding = working(output, embedding)
        products = 2.0 * torch.linalg.vecdot(output, embedding).double()
        for index, span in self.owned(owners).segments:
            self.table[KINDS.index("embedding"), index] += products[span].sum()
        owners.output_part = owners.embedding_part = None

    def owned(self, owners: MicroBatchRows) -> Rows:
        """The rows whose trajectories this rank owns: all of them, except under context parallelism."""
        group = self.layout.sharded.group
        return owners.rows if group is None else owners.rows.exchange(group).rows

    # ------------------------------------------------------------------ the result

    def reduce(self) -> Tensor:
        """[kinds, N] fp64: energies so far, over all ranks, each parameter counted once; collective over all ranks."""
        self._exchange_tied_parts()
        table = self.table.clone()
        for group in (self.layout.tp, self.layout.pp, self.layout.dp_cp):
            if group_size(group) > 1:
                dist.all_reduce(table, group=group)
        return table

    def _exchange_tied_parts(self) -> None:
        # Micro-batches come in the same order on the first and the last stage; the last stage has the output layer's
        # parts.
        parts, self._tied_parts = self._tied_parts, []
        first = dist.get_process_group_ranks(self.layout.embd)[0] if parts else 0
        for owners in parts:
            here = dist.get_rank() == first
            part = owners.embedding_part if here else torch.empty_like(owners.output_part)
            dist.broadcast(part, first, group=self.layout.embd)
            if not here:
                owners.embedding_part = part
                self._add_cross_term(owners)
