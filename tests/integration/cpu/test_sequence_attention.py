"""Ulysses and ring on gloo ranks, against one process and against yunchang on the same groups."""

import pytest
import torch
from ranks import run_ranks
from sequence_attention_cases import check_ring, check_ulysses

# fp32: softmax in parts. Attended padding of 1e4 gives above 1.
TOLERANCE = 5e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("world", [2, 3])
def test_ulysses_moves_heads_and_back_as_yunchang_does(world: int, dtype: torch.dtype) -> None:
    found = run_ranks(check_ulysses, world, dtype)
    assert all(found.values()), found


@pytest.mark.parametrize(("world", "tokens"), [(2, 12), (3, 10), (4, 5), (4, 2), (3, 1)])
def test_ring_attends_to_valid_keys_of_every_block(world: int, tokens: int) -> None:
    found = run_ranks(check_ring, world, tokens)
    assert found["ours"] < TOLERANCE
    if tokens % world == 0:
        assert found["yunchang"] < TOLERANCE
    else:
        assert found["padding attended"] > 1
