"""Both halves of a narrow block, one kernel each, in Triton's interpreter against plain torch in fp64."""

import fused_calls
import pytest
import torch
import torch.nn.functional as F
from fused_cases import EPS, HEAD_EPS, MLP, QKV, Half, error, frequencies, randn

from layers.fused import launch, narrow
from layers.fused.narrow import fold_norm, pack_mlp

F16, F32 = torch.float16, torch.float32
# Relative L2 to fp64: the order of fp32 sums; fp16 rounds the hidden activations and the result.
TOLERANCE = {F32: 3e-6, F16: 8e-4}


@pytest.mark.parametrize("dtype", [F32, F16], ids=str)
@pytest.mark.parametrize(("grid", "channels", "count", "head_dim", "where", "starts"), QKV, ids=str)
def test_project_heads(interpreted, grid, channels, count, head_dim, where, starts, dtype):
    half, own = Half(grid, channels, 3 * count * head_dim, dtype), frequencies(head_dim)
    into, gains = fold_norm(half.weights[0], half.bias, *half.norm), randn(2, head_dim, seed=8)
    want = half.heads(into, gains, own, starts, head_dim)
    got = interpreted(
        fused_calls.project_heads, half.x, half.pending, into, gains, own, starts, eps=EPS, head_eps=HEAD_EPS,
        head_dim=head_dim, where=where,
    )  # fmt: skip
    for name, a, b in zip("qkv", got, want, strict=True):
        assert a.dtype == dtype
        assert error(a, b) <= TOLERANCE[dtype], name


def check_mlp(interpreted, half):
    gate, up = (fold_norm(weight, None, *half.norm) for weight in half.weights)
    got = interpreted(fused_calls.gated_mlp, half.x, half.pending, gate, up, half.down, eps=EPS)
    assert got.dtype == half.x.dtype
    assert error(got, half.mlp(gate, up)) <= TOLERANCE[half.x.dtype]


@pytest.mark.parametrize("dtype", [F32, F16], ids=str)
@pytest.mark.parametrize(("grid", "channels", "hidden"), MLP, ids=str)
def test_gated_mlp(interpreted, grid, channels, hidden, dtype):
    check_mlp(interpreted, Half(grid, channels, hidden, dtype))


@pytest.mark.parametrize(("dtype", "size"), [(F32, 1e12), (F32, 1e-3), (F16, 1e3)], ids=str)
def test_gated_mlp_of_large_and_small_tokens(interpreted, dtype, size):
    """The product is of tokens as they are, before they are divided by their length: 1e3 squared is beyond fp16."""
    check_mlp(interpreted, Half((1, 2, 3, 5), 64, 64, dtype, size=size))


@pytest.mark.parametrize("modulated", [True, False], ids=["modulated", "plain"])
@pytest.mark.parametrize("biased", [True, False], ids=["bias", "no bias"])
def test_fold_norm_is_the_norm_then_the_layer(biased, modulated):
    half = Half((1, 2, 3, 5), 48, 20, F32)
    bias = half.bias if biased else None
    want = F.rms_norm((half.x + half.pending).double(), (48,), half.gain.double(), EPS)
    if modulated:
        want = want * half.scale.double() + half.shift.double()
    want = F.linear(want, half.weights[0].double(), None if bias is None else bias.double())
    folded = fold_norm(half.weights[0], bias, half.gain, half.norm[1] if modulated else None, half.pending)
    assert error(half.applied(folded), want) <= 1e-6


def test_pending_is_taken_through_the_weights_as_they_are_rounded():
    """Where x + pending is 0 its norm divides by sqrt(eps): what the rounding of weights leaves there would be seen."""
    half = Half((1, 1, 1, 1), 64, 32, torch.bfloat16)
    half.pending = -half.x.float().flatten()
    folded = fold_norm(half.weights[0], half.bias, half.gain, half.norm[1], half.pending)
    assert error(half.applied(folded).flatten(), folded.after) <= 1e-4
    want = half.weights[0].double() @ half.shift.double() + half.bias.double()
    assert error(folded.after, want) <= 1e-6, "the shift goes through the weights as they were"


def test_pack_mlp_weaves_gate_and_up():
    """Block by block of hidden units: gate rows, then up rows; w_down's columns become rows."""
    half = Half((1, 1, 1, 1), 32, 96, F32)
    gate, up = (fold_norm(weight, None, *half.norm) for weight in half.weights)
    down = randn(32, 96, seed=9)
    packed = pack_mlp(gate, up, down)
    block = launch.blocks(torch.device("cpu")).mlp[1]
    for name in ("weight", "before", "after"):
        woven = getattr(packed.into, name)
        assert woven.is_contiguous()
        for first in range(0, 96, block):
            part = woven[2 * first : 2 * (first + block)]
            assert torch.equal(part[:block], getattr(gate, name)[first : first + block])
            assert torch.equal(part[block:], getattr(up, name)[first : first + block])
    assert torch.equal(packed.w_down, down.T)
    assert packed.w_down.is_contiguous()


BLOCK = launch.BLOCKS["default"].mlp[1]
SERVED = {
    "as in stage 5": (256, F16, {"hidden": 1024, "head_dim": 64}, True),
    "narrowest": (32, F32, {"hidden": BLOCK, "head_dim": 16}, True),
    "one head": (64, F32, {"hidden": 256, "head_dim": 64}, True),
    "bf16 on a CPU": (256, torch.bfloat16, {"hidden": 1024, "head_dim": 64}, False),
    "too wide": (512, F32, {"hidden": 2048, "head_dim": 64}, False),
    "too narrow": (16, F32, {"hidden": 64, "head_dim": 16}, False),
    "48 channels": (48, F32, {"hidden": 192, "head_dim": 16}, False),
    "hidden not of whole blocks": (64, F32, {"hidden": 3 * BLOCK + 16, "head_dim": 16}, False),
    "heads of 8": (64, F32, {"hidden": 256, "head_dim": 8}, False),
    "heads of 48": (64, F32, {"hidden": 256, "head_dim": 48}, False),
    "heads wider than the tokens": (64, F32, {"hidden": 256, "head_dim": 128}, False),
}


@pytest.mark.parametrize(("channels", "dtype", "sizes", "expected"), SERVED.values(), ids=SERVED)
def test_serves(interpreted, channels, dtype, sizes, expected):
    assert interpreted(fused_calls.serves, channels, dtype, **sizes) is expected


def test_serves_nothing_where_kernels_are_compiled_and_there_is_no_gpu(compiling):
    assert compiling(fused_calls.serves, 256, F16, hidden=1024, head_dim=64) is False
    assert narrow.serves(torch.empty(1, 256), hidden=1024, head_dim=64) is False


def test_tokens_with_gaps_are_refused(interpreted):
    assert interpreted(fused_calls.is_interpreted)
    for half in ("mlp", "heads"):
        with pytest.raises(ValueError, match="x must be contiguous within a batch entry; got strides"):
            interpreted(fused_calls.half_of_tokens_with_gaps, half)
    with pytest.raises(ValueError, match="the last stride must be 1; got strides"):
        interpreted(fused_calls.half_of_tokens_with_gaps, "strided heads")
