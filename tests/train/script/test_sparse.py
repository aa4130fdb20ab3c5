"""Sparse gradients go through dense buffers and come out with the rows of all ranks."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from paceline.train.script.sparse import from_flat, to_flat


@given(st.lists(st.lists(st.integers(0, 6), max_size=5), min_size=1, max_size=4), st.booleans())
def test_the_average_has_the_rows_and_values_that_sparse_sums_have(
    ranks: list[list[int]], wide: bool
) -> None:
    shape = (7, 3) if wide else (7,)
    gradients = [
        torch.sparse_coo_tensor(
            torch.tensor([rows], dtype=torch.int64),
            torch.full((len(rows), *shape[1:]), float(2**at)),
            shape,
            check_invariants=True,
        )
        for at, rows in enumerate(ranks)
    ]
    total = torch.stack([to_flat(gradient) for gradient in gradients]).sum(0)
    average = from_flat(total / len(ranks), gradients[0])
    dense = torch.stack([gradient.to_dense() for gradient in gradients]).sum(0) / len(ranks)
    assert torch.equal(average.to_dense(), dense)
    assert average.coalesce().indices()[0].tolist() == sorted({r for rows in ranks for r in rows})


def test_a_row_whose_values_cancel_stays_in_the_average() -> None:
    one = torch.eye(4)[2].to_sparse()
    average = from_flat((to_flat(one) + to_flat(-one)) / 2, one)
    assert average.coalesce().indices().tolist() == [[2]]
    assert average.coalesce().values().tolist() == [0.0]
