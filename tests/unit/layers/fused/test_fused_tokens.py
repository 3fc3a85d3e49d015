"""Norms, gated products and bytes: the kernels in Triton's interpreter against their twins in plain torch."""

import fused_calls
import pytest
import torch
import torch.nn.functional as F
from diffusers.models.autoencoders.ltx2_diffusion_decoder import _unpatchify
from fused_cases import BYTES, SILU, TOKENS, error, gated, hidden_frames, modulation, norm64, randn

from layers.fused import reference, tokens
from runner_models.ltx2.pixels import to_uint8

F16, F32 = torch.float16, torch.float32
# Relative L2 to fp64: the order of fp32 sums, or one rounding to fp16.
TOLERANCE = {F32: 5e-7, F16: 4e-4}


@pytest.mark.parametrize("modulated", [False, True], ids=["plain", "modulated"])
@pytest.mark.parametrize("dtype", [F32, F16], ids=str)
@pytest.mark.parametrize("shape", TOKENS, ids=str)
def test_rms_norm(interpreted, shape, dtype, modulated):
    x, gain = randn(*shape, dtype=dtype, seed=1), randn(shape[-1], dtype=dtype, seed=2)
    fold = {"eps": 1e-3, **(modulation(shape[0], shape[-1], dtype) if modulated else {})}
    want = norm64(x, gain, **fold)
    got = interpreted(fused_calls.rms_norm, x, gain, where="frames", **fold)
    assert got.shape == x.shape
    assert got.dtype == dtype
    assert error(got, want) <= TOLERANCE[dtype]
    assert error(tokens.rms_norm(x, gain, **fold), want) <= TOLERANCE[dtype], "the twin"


@pytest.mark.parametrize("modulated", [False, True], ids=["plain", "modulated"])
@pytest.mark.parametrize("dtype", [F32, F16], ids=str)
@pytest.mark.parametrize("shape", TOKENS, ids=str)
def test_add_rms_norm(interpreted, shape, dtype, modulated):
    x, y, gain = randn(*shape, dtype=dtype), randn(*shape, dtype=dtype, seed=1), randn(shape[-1], dtype=dtype, seed=2)
    fold = {"eps": 1e-3, **(modulation(shape[0], shape[-1], dtype) if modulated else {})}
    total = x + y
    want = norm64(total, gain, **fold)  # of the sum as it is stored
    added, normed = interpreted(fused_calls.add_rms_norm, x, y, gain, where="frames", **fold)
    assert torch.equal(added, total)
    assert error(normed, want) <= TOLERANCE[dtype]
    twin = tokens.add_rms_norm_(x, y, gain, **fold)
    assert torch.equal(x, total)
    assert error(twin, want) <= TOLERANCE[dtype], "the twin"
    assert error(normed, twin) <= TOLERANCE[dtype] / 4, "they round at the same places"


@pytest.mark.parametrize(("dtype", "size"), [(F32, 1e16), (F32, 1e-12), (F16, 3e4), (F16, 1e-6)], ids=str)
def test_rms_norm_of_large_and_small_values(interpreted, dtype, size):
    """Squares are taken in fp32: 3e4 is near the end of fp16, whose squares are not."""
    x = (randn(1, 2, 3, 5, 100).clamp(-2, 2) * size).to(dtype)
    gain = randn(100, dtype=dtype, seed=2)
    want = norm64(x, gain, eps=1e-6)
    assert error(interpreted(fused_calls.rms_norm, x, gain, eps=1e-6), want) <= TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", [F32, F16], ids=str)
@pytest.mark.parametrize("shape", SILU, ids=str)
def test_silu_mul(interpreted, shape, dtype):
    gate, up = gated(shape, dtype)
    want = F.silu(gate.double()) * up.double()
    got = interpreted(fused_calls.silu_mul, gate.clone(), up)
    assert got.dtype == dtype
    assert error(got, want) <= TOLERANCE[dtype]
    assert error(tokens.silu_mul_(gate, up), want) <= TOLERANCE[dtype], "the twin"


@pytest.mark.parametrize("dtype", [F32, F16], ids=str)
@pytest.mark.parametrize(("shape", "patch"), BYTES, ids=str)
def test_bytes(interpreted, shape, patch, dtype):
    """Bit for bit."""
    hidden = hidden_frames(shape, patch, dtype)
    want = reference.patches_to_bytes(hidden, patch)
    assert want.unique().numel() > 2 or shape == (1, 1, 1, 1)
    assert torch.equal(interpreted(fused_calls.patches_to_bytes, hidden, patch), want)
    # A tensor that is a part of another one, as chunks are.
    cut = torch.cat((hidden, hidden), dim=3)[:, :, :, : shape[3]]
    assert torch.equal(interpreted(fused_calls.patches_to_bytes, cut, patch), want)


def test_bytes_are_those_of_the_stock_way():
    """diffusers' unpatchify, then the pipeline's clamp and rounding."""
    hidden = hidden_frames((2, 3, 5, 7), 4, F32)
    want = to_uint8(_unpatchify(hidden.permute(0, 4, 1, 2, 3), 4))
    assert torch.equal(reference.patches_to_bytes(hidden, 4), want)


def test_bad_input_says_what_is_allowed(interpreted):
    assert interpreted(fused_calls.is_interpreted)
    x, gain, one = randn(1, 2, 3, 5, 48), randn(48), torch.ones(1, 1, 1, 1, 48)
    rows = randn(1, 2, 6, 5, 48)[:, :, ::2]
    for run, message in (
        (lambda: interpreted(fused_calls.rms_norm, x, gain, eps=1e-6, scale=one), "given together or not at all"),
        (lambda: interpreted(fused_calls.rms_norm, x, gain, eps=1e-6, shift=one), "given together or not at all"),
        (lambda: tokens.rms_norm(x, gain, eps=1e-6, scale=one), "given together or not at all"),
        (
            lambda: interpreted(fused_calls.add_rms_norm, x, x[:, :1], gain, eps=1e-6),
            r"x \(1, 2, 3, 5, 48\) and y \(1, 1, 3, 5, 48\) must be of one shape",
        ),
        (lambda: tokens.add_rms_norm_(x, x[:, :1], gain, eps=1e-6), "must be of one shape"),
        (lambda: interpreted(fused_calls.rms_norm, x, gain, eps=1e-6, where="rows"), "x must be contiguous within"),
        (
            lambda: interpreted(fused_calls.add_rms_norm, x, x.clone(), gain, eps=1e-6, where="columns"),
            r"contiguous within a batch entry; got strides \(3168, .*\) of \(1, 2, 3, 5, 48\)",
        ),
        (lambda: interpreted(fused_calls.silu_mul, x, x[:, :1]), r"gate \(1, 2, 3, 5, 48\) and up \(1, 1, 3, 5, 48\)"),
        (lambda: interpreted(fused_calls.silu_mul, rows, rows), "must be contiguous and of one shape"),
        (lambda: tokens.silu_mul_(rows, rows), "must be contiguous and of one shape"),
    ):
        with pytest.raises(ValueError, match=message):
            run()
