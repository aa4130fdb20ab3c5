"""The choice of a GPU for each rank, and the error for a rank that can use none."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from paceline.core.gpus import NoGpu, own_gpu, why_none

UNLOADED = "Found no NVIDIA driver on your system."


@given(ranks=st.integers(1, 64), visible=st.integers(2, 16))
def test_ranks_share_gpus_evenly_and_only_if_necessary(ranks: int, visible: int) -> None:
    taken = Counter(own_gpu(index, visible=visible) for index in range(ranks))
    assert taken.keys() <= set(range(visible))
    assert max(taken.values()) - min(taken.values()) <= 1
    if ranks <= visible:
        assert len(taken) == ranks


@pytest.mark.parametrize("visible", [0, 1])
def test_no_gpu_is_selected_if_at_most_one_is_visible(visible: int) -> None:
    assert {own_gpu(index, visible=visible) for index in range(4)} == {None}


@pytest.mark.parametrize(
    ("no_gpu", "local", "problem", "hint"),
    [
        (NoGpu("", True, ""), False, "CUDA_VISIBLE_DEVICES='' hides every GPU", "remove it"),
        (NoGpu("-1", False, UNLOADED), True, "CUDA_VISIBLE_DEVICES='-1' hides", "name the devices"),
        (NoGpu(None, False, UNLOADED), False, "no NVIDIA driver", "request nvidia.com/gpu in"),
        (NoGpu(None, False, UNLOADED), True, "no NVIDIA driver", "install NVIDIA's driver"),
        (NoGpu("0", True, "driver too old"), True, "driver too old", "compare the versions"),
        (NoGpu(None, True, UNLOADED), False, "torch can use no GPU", "request nvidia.com/gpu in"),
    ],
    ids=["hidden", "hidden by number", "pod", "laptop", "old driver", "not given to the pod"],
)
def test_the_error_for_a_rank_without_a_gpu_names_cause_and_remedy(
    no_gpu: NoGpu, local: bool, problem: str, hint: str
) -> None:
    error, way = why_none(no_gpu, local=local)
    assert problem in error
    assert hint in way
    assert ("nvidia.com/gpu" in way) <= (not local), "a laptop has no pods to ask for"
