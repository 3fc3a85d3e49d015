"""What a block does to each token alone, both ways, against the stock block on the same weights."""

import pointwise_calls
import pytest
from pointwise_calls import Case

# Relative L2 in fp32: the order of sums, and norms applied after the product. A wrong bias or position is at 1e-2.
TOLERANCE = 3e-6
NAMES = ("q", "k", "v", "frames")
CASES = [
    Case(diffusion=False),
    Case(diffusion=False, batch=2, head_dim=64, starts=(400, 0, 3), counts=(1, 5, 7)),
    Case(diffusion=True, starts=(2, 1, 3)),
    Case(diffusion=True, batch=2, channels=32, head_dim=32, starts=(0, 90, 0), counts=(2, 3, 5)),
    Case(diffusion=True, channels=128, head_dim=32, counts=(1, 1, 1)),
]
WIDE = Case(diffusion=True, batch=2, channels=96, starts=(1, 0, 2))  # no power of two: never fused


def check(found):
    for name, got, want in zip(NAMES, *found, strict=True):
        assert got.shape == want.shape
        assert ((got - want).norm() / want.norm()).item() <= TOLERANCE, name  # false for NaN


@pytest.mark.parametrize("slice_tokens", [None, 80], ids=["at once", "in slices"])
@pytest.mark.parametrize("case", [*CASES, WIDE], ids=str)
def test_sliced_tokens_in_plain_torch(case, slice_tokens):
    check(pointwise_calls.halves(case, "sliced", slice_tokens=slice_tokens))


@pytest.mark.parametrize("case", [CASES[1], CASES[2], WIDE], ids=str)
def test_sliced_tokens_by_kernels(interpreted, case):
    check(interpreted(pointwise_calls.halves, case, "sliced", slice_tokens=80))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_fused_tokens(interpreted, case):
    check(interpreted(pointwise_calls.halves, case, "fused"))


def test_the_faster_way_is_taken_where_there_is_one(interpreted):
    assert interpreted(pointwise_calls.chosen, CASES[2]) == "FusedTokens"
    assert interpreted(pointwise_calls.chosen, WIDE) == "SlicedTokens"
    assert pointwise_calls.chosen(CASES[2]) == "SlicedTokens"


LINEARS = ("to_q", "to_k", "to_v", "to_out.0", "w_gate", "w_up", "w_down", "context_proj")
BY_WEIGHT = ("to_q", "to_k", "to_v", "w_down")
"""Layers that SlicedTokens does not call: it uses their weights."""


@pytest.mark.parametrize("name", LINEARS)
def test_fused_tokens_refuse_an_adapter(interpreted, name):
    with pytest.raises(ValueError, match=rf"^{name} of the decoder is a Linear, .*adapter is attached. Merge it into"):
        interpreted(pointwise_calls.halves, Case(diffusion=True, adapter=name), "fused")


@pytest.mark.parametrize("name", LINEARS)
def test_sliced_tokens_refuse_an_adapter_or_obey_it(name):
    case = Case(diffusion=True, adapter=name)
    if name not in BY_WEIGHT:
        check(pointwise_calls.halves(case, "sliced"))
        return
    with pytest.raises(ValueError, match=rf"^{name} of the decoder is a Linear, .*adapter is attached. Merge it into"):
        pointwise_calls.halves(case, "sliced")
