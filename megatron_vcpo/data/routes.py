"""Routes: the experts chosen for each token in each layer with experts, in as few bytes as possible.

An array [rows, layers, k] of expert ids; only layers with experts count, and row t belongs to token t of prompt +
response. A row that was not recorded holds its dtype's marker everywhere: 255 in uint8, -1 in int16. With two or more
experts a token, a row of 255 cannot occur otherwise, so uint8 is enough even for 256 experts.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

RouteArray = npt.NDArray[np.uint8] | npt.NDArray[np.int16]

_UINT8_MARK = 255


def route_dtype(num_experts: int, k: int) -> np.dtype[Any]:
    """The smallest dtype for every expert's id and the marker of a missing row, with k experts a token."""
    largest = _UINT8_MARK + 1 if k > 1 else _UINT8_MARK
    return np.dtype(np.uint8 if num_experts <= largest else np.int16)


def compact_routes(routes: npt.NDArray[Any], *, num_experts: int, rows: int) -> RouteArray:
    """Check and shrink recorded routes.

    Args:
        routes: [n, layers, k] of any integer dtype, n at most `rows`; negative ids mark a missing row.
        num_experts: number of experts; ids must be below it.
        rows: rows of the result; those beyond the recorded ones are marked as missing.

    Raises:
        ValueError: an id out of range, or the same expert twice for a token, which no router chooses.
    """
    ids = routes.astype(np.int32)
    if len(ids) > rows:
        raise ValueError(f"there are {len(ids)} rows of routes for {rows} tokens")
    missing = (ids < 0).any(axis=(1, 2))
    known = ids[~missing]
    if known.size and int(known.max()) >= num_experts:
        raise ValueError(f"there is an expert {int(known.max())} among the routes, of {num_experts} experts")
    ordered = np.sort(known, axis=-1)
    if (ordered[..., 1:] == ordered[..., :-1]).any():
        raise ValueError("a token was routed to one expert twice")
    dtype = route_dtype(num_experts, ids.shape[2])
    out = np.full((rows, *ids.shape[1:]), _UINT8_MARK if dtype == np.uint8 else -1, dtype)
    out[: len(ids)][~missing] = known
    return out


def signed_routes(routes: RouteArray) -> npt.NDArray[np.int16]:
    """The routes in int16 with -1 as the marker, whatever their dtype."""
    signed = routes.astype(np.int16)
    if routes.dtype == np.uint8:
        signed[(routes == _UINT8_MARK).all(axis=(1, 2))] = -1
    return signed
