"""What one use of a parameter adds to every trajectory's gradient: one class for each kind of parameter.

With x the rows that enter and g the gradients of the rows that leave, the gradient of trajectory i is
sum_t g_t x_t^T over its rows for a matrix, sum_t v_t for a vector, and the rows of g summed for each word for an
embedding. A contribution first gives its energies, || gradient of i ||^2, and then sum_i c_i * (gradient of i) for any
c.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_vcpo.mcore.energies.rows import Rows

Values = npt.NDArray[np.float64]

_ROWS_AT_ONCE = 256  # up to here, launching many small products takes longer than one product over all pairs of rows
_FEW_ROWS = 48  # below this, three passes over a [d_out, d_in] product take longer than a second multiplication


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """How ranks with the same shard of a parameter share its energy; energies of different shards simply add up."""

    group: Any = None  # ranks that hold the same shard and parts of the same trajectories; None: only this rank
    counts: bool = True  # False: another rank with the same shard and the same rows counts them


class Products(enum.Enum):
    """What becomes of a trajectory's own weight gradient, if it is formed to compute its norm."""

    NONE = enum.auto()  # only its norm is wanted
    SMALLER = enum.auto()  # kept in place of the rows if it is cheaper to form, because it is then also smaller
    ALWAYS = enum.auto()  # formed even where the norm alone would be cheaper, because it will be used twice


class Contribution(Protocol):
    """One use of one parameter in one micro-batch."""

    def add_energies(self, into: Tensor, products: Products) -> None:
        """Add the energies that this rank counts to `into`, [N] fp64. Call once; collective over the share's group."""

    def add_gradient(self, into: Tensor, coefficients: Values) -> None:
        """Add sum_i c_i * (gradient of i) to `into`, which has the parameter's shape, for c [N]; after `add_energies`.

        The sum is complete once Megatron has summed gradients over ranks. Trajectories with c_i = 0 are left out, even
        if their rows hold NaN.
        """


def squared_norm(values: Tensor) -> Tensor:
    """Sum of squares of [r, d]: scalar fp64. Rows are summed in their own dtype: cheap even for a big product."""
    return torch.linalg.vecdot(values, values).double().sum()


def working(*tensors: Tensor) -> list[Tensor]:
    """Tensors in a common dtype, at least fp32: products of half-precision rows would be rounded to half precision."""
    dtype = torch.float32
    for tensor in tensors:
        dtype = torch.promote_types(dtype, tensor.dtype)
    return [tensor.to(dtype) for tensor in tensors]


def weigh(g: Tensor, factors: Tensor) -> Tensor:
    """Rows [t, d] times their factors [t], in at least fp32: half precision would change the factors."""
    (g,) = working(g)
    return g * factors.to(g.dtype)[:, None]


class OpenProducts:
    """Gradients of trajectories whose rows arrive in pieces, from an output layer that runs chunk by chunk."""

    def __init__(self) -> None:
        self._open: dict[int, tuple[Tensor, int]] = {}  # trajectory -> its gradient so far, rows still missing

    def add(self, index: int, product: Tensor, rows: int, of: int) -> Tensor | None:
        """Add the product of `rows` of the trajectory's `of` rows; return its gradient once complete, else None."""
        before, left = self._open.pop(index, (None, of))
        total = product if before is None else before.add_(product)
        if left == rows:
            return total
        self._open[index] = total, left - rows
        return None


@dataclass(slots=True, kw_only=True)
class MatrixContribution:
    """A linear layer: weight [d_out, d_in]."""

    x: Tensor  # [t, d_in]
    g: Tensor  # [t, d_out]
    rows: Rows
    share: Share
    formed: list[tuple[int, Tensor]] = field(default_factory=list)  # trajectories and their gradients [d_out, d_in]
    whole: Rows | None = None  # if these rows are a chunk: the rows of all chunks, and
    open: OpenProducts | None = None  # the gradients that the chunks add up in

    def add_energies(self, into: Tensor, products: Products) -> None:
        """The norm of g^T x by that product or by sum_ts (g_t.g_s)(x_t.x_s), whichever needs fewer multiplications.

        Source: the mixed ghost norm of arXiv 2205.10683.
        """
        whole = self.whole
        if self.share.group is not None:
            exchange = self.rows.exchange(self.share.group)
            self.rows, self.x, self.g = exchange.rows, exchange(self.x), exchange(self.g)
            whole = None if whole is None else whole.exchange(self.share.group).rows
        if whole is not None:
            self._add_chunk(into, whole)
            return
        widths, size = self.x.size(1) + self.g.size(1), self.x.size(1) * self.g.size(1)
        few = len(self.x) <= _ROWS_AT_ONCE and size > len(self.x) * widths
        if few and products is not Products.ALWAYS:
            self._add_ghost_norms(into)
            return
        for index, span in self.rows.segments:
            x, g = working(self.x[span], self.g[span])
            if size <= len(x) * widths or (products is Products.ALWAYS and len(x) >= _FEW_ROWS):
                product = g.t() @ x
                energy = squared_norm(product)
                if products is not Products.NONE:
                    self.formed.append((index, product))
            else:
                energy = (g @ g.t()).mul_(x @ x.t()).sum(dtype=torch.float64)
            if self.share.counts:
                into[index] += energy
        if self.formed:
            self._keep_rows_of_others()

    def _add_chunk(self, into: Tensor, whole: Rows) -> None:
        assert self.open is not None
        for index, span in self.rows.segments:
            x, g = working(self.x[span], self.g[span])
            product = self.open.add(index, g.t() @ x, len(x), of=whole.counts[index])
            if product is not None and self.share.counts:
                into[index] += squared_norm(product)

    def _add_ghost_norms(self, into: Tensor) -> None:
        """All trajectories at once: one product over all pairs of rows instead of many tiny ones (experts)."""
        if not self.share.counts:
            return
        owners, members = self.rows.membership
        x, g = working(self.x, self.g)
        pairs = (g @ g.t()).mul_(x @ x.t())
        same = (members.to(x.dtype).t() @ members.to(x.dtype)) > 0
        of_rows = torch.where(same, pairs, 0.0).sum(1, dtype=torch.float64)
        into[owners] += torch.where(members, of_rows, 0.0).sum(1)

    def _keep_rows_of_others(self) -> None:
        left, index = self.rows.without([owner for owner, _ in self.formed])
        self.rows, self.x, self.g = left, self.x[index], self.g[index]

    def add_gradient(self, into: Tensor, coefficients: Values) -> None:
        for index, product in self.formed:
            if coefficients[index] != 0.0:
                into.add_(product, alpha=float(coefficients[index]))
        if len(self.rows.ids) == 0:
            return
        factors, keep = self.rows.coefficients(coefficients)
        x, g = (self.x, self.g) if keep is None else (self.x[keep], self.g[keep])
        dtype = torch.promote_types(x.dtype, g.dtype)
        weighted, x = weigh(g, factors).to(dtype), x.to(dtype)
        if into.dtype == dtype:
            into.addmm_(weighted.t(), x)
        else:
            into.add_(weighted.t() @ x)


@dataclass(frozen=True, slots=True, kw_only=True)
class VectorContribution:
    """A bias or the weight of a norm: [d]."""

    sums: Tensor  # [n, d] gradient of each of `rows.members`, from this rank's rows
    rows: Rows
    share: Share

    @staticmethod
    def of(values: Tensor, rows: Rows, share: Share) -> VectorContribution:
        """Sum the rows' terms, `values` [t, d], for each trajectory."""
        (values,) = working(values)
        sums = values.new_zeros(len(rows.members), values.size(1))
        slots = {index: slot for slot, index in enumerate(rows.members.tolist())}
        for index, span in rows.segments:
            sums[slots[index]] = values[span].sum(0)
        return VectorContribution(sums=sums, rows=rows, share=share)

    def add_energies(self, into: Tensor, products: Products) -> None:
        total, counts = self.sums, self.share.counts
        if self.share.group is not None:
            total = total.clone()
            dist.all_reduce(total, group=self.share.group)
            counts = counts and dist.get_rank(self.share.group) == 0
        if counts:
            members = torch.from_numpy(self.rows.members).to(into.device)
            into.index_add_(0, members, total.double().square().sum(1))

    def add_gradient(self, into: Tensor, coefficients: Values) -> None:
        factors = coefficients[self.rows.members]
        kept = torch.from_numpy(factors.nonzero()[0]).to(self.sums.device)
        into.add_(torch.from_numpy(factors).to(self.sums)[kept] @ self.sums[kept])


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingContribution:
    """An embedding table, of which this rank holds `height` words, starting at `first`."""

    g: Tensor  # [t, d] gradient of each row's embedding
    words: Tensor  # [t] int64, global
    rows: Rows
    share: Share
    first: int
    height: int

    def add_energies(self, into: Tensor, products: Products) -> None:
        rows, g, words = self.rows, self.g, self.words
        if self.share.group is not None:
            exchange = rows.exchange(self.share.group)
            rows, g, words = exchange.rows, exchange(g), exchange(words)
        for index, span in rows.segments:
            own, g_own = self._of_shard(words[span], working(g[span])[0])
            distinct, place = own.unique(return_inverse=True)
            into[index] += squared_norm(g_own.new_zeros(len(distinct), g.size(1)).index_add_(0, place, g_own))

    def _of_shard(self, words: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        own = (words >= self.first) & (words < self.first + self.height)
        return words[own] - self.first, g[own]

    def add_gradient(self, into: Tensor, coefficients: Values) -> None:
        factors, keep = self.rows.coefficients(coefficients)
        g, words = (self.g, self.words) if keep is None else (self.g[keep], self.words[keep])
        own, g_own = self._of_shard(words, weigh(g, factors))
        into.index_add_(0, own, g_own.to(into.dtype))
