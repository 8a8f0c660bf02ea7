"""Routes in few bytes: nothing is lost, missing rows stay missing, and impossible ones are refused."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_vcpo.data.routes import compact_routes, route_dtype, signed_routes


def test_a_byte_holds_the_ids_of_256_experts_and_a_mark_that_no_token_of_two_experts_can_have():
    assert route_dtype(4, 1) == route_dtype(255, 1) == route_dtype(256, 2) == np.uint8
    assert route_dtype(256, 1) == route_dtype(257, 8) == np.int16  # 255 is an expert there


def test_expert_255_of_256_is_no_missing_row():
    rows = np.array([[[255, 3]], [[-1, -1]], [[0, 255]]])
    compact = compact_routes(rows, num_experts=256, rows=3)
    assert compact.dtype == np.uint8
    np.testing.assert_array_equal(signed_routes(compact), rows)
    alone = np.array([[[255], [255]], [[-1], [-1]]])
    np.testing.assert_array_equal(signed_routes(compact_routes(alone, num_experts=256, rows=2)), alone)


@pytest.mark.parametrize("num_experts", [255, 256, 512])
def test_compact_routes_come_back_with_missing_rows_marked_by_minus_one(num_experts):
    rng = np.random.default_rng(0)
    routes = np.stack([[rng.choice(num_experts, 4, replace=False) for _ in range(3)] for _ in range(6)])
    routes[5, 2, 3] = num_experts - 1 if num_experts - 1 not in routes[5, 2] else routes[5, 2, 3]
    routes[2, 1, 0] = -1  # one place makes the row unknown
    compact = compact_routes(routes, num_experts=num_experts, rows=8)
    assert compact.shape == (8, 3, 4)
    assert compact.dtype == route_dtype(num_experts, 4)
    back = signed_routes(compact)
    expected = routes.copy()
    expected[2] = -1
    np.testing.assert_array_equal(back[:6], expected)
    assert (back[6:] == -1).all()


@pytest.mark.parametrize(
    ("routes", "message"),
    [
        ([[[0, 0]]], "twice"),
        ([[[0, 4]]], "an expert 4 among the routes, of 4"),
        ([[[0, 1]]] * 3, "3 rows of routes for 2"),
    ],
)
def test_impossible_routes_are_refused(routes, message):
    with pytest.raises(ValueError, match=message):
        compact_routes(np.array(routes, np.uint8), num_experts=4, rows=2)
