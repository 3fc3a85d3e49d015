"""Head norms and rotary embedding: the kernel in Triton's interpreter against fp64, the angles against diffusers', and
the bound of the scores."""

import math

import fused_calls
import pytest
import torch
from diffusers.models.autoencoders.ltx2_diffusion_decoder import LTX2VideoVaeRotaryPosEmbed3D
from fused_cases import HEADS, error, frequencies, randn, rotary, rotated64

from layers.fused import heads, reference
from layers.fused.heads import HeadNorms, Rotary, norm_rotate_heads, softmax_bound

F16, F32 = torch.float16, torch.float32
# Relative L2 to fp64: fp32 angles of position 400 are off by 1e-5 of a turn; or one rounding to fp16.
TOLERANCE = {F32: 2e-6, F16: 4e-4}


@pytest.mark.parametrize("dtype", [F32, F16], ids=str)
@pytest.mark.parametrize(("grid", "count", "head_dim", "where", "starts"), HEADS, ids=str)
def test_norm_rotate_heads(interpreted, grid, count, head_dim, where, starts, dtype):
    qkv = 3 * randn(*grid, 3 * count * head_dim, dtype=dtype)
    gains, own = randn(2, head_dim, seed=1), frequencies(head_dim)
    q, k, v = qkv.unflatten(-1, (3, count, head_dim)).unbind(-3)
    want = [rotated64(x, gain, own, starts, eps=1e-3) for x, gain in zip((q, k), gains, strict=True)]
    got = interpreted(fused_calls.norm_rotate_heads, qkv, gains, own, starts, eps=1e-3, head_dim=head_dim, where=where)
    for name, a, b in zip("qk", got, want, strict=False):
        assert error(a, b) <= TOLERANCE[dtype], name
    assert torch.equal(got[2], v)
    out = [torch.full_like(v, float("nan")) for _ in range(3)]
    norm_rotate_heads(qkv, HeadNorms(gains, 1e-3), rotary(own, starts, grid[1:]), out=tuple(out))
    for name, a, b in zip("qk", out, want, strict=False):
        assert error(a, b) <= TOLERANCE[dtype], f"the twin's {name}"
    assert torch.equal(out[2], v)


def test_the_twin_in_place():
    """Q is written before K is read: each has memory of its own."""
    qkv, gains, own = randn(1, 2, 3, 4, 3 * 2 * 16), randn(2, 16, seed=1), frequencies(16)
    parts = qkv.clone().unflatten(-1, (3, 2, 16)).unbind(-3)
    norm_rotate_heads(
        qkv, HeadNorms(gains, 1e-6), rotary(own, (0, 0, 0), (2, 3, 4)), out=qkv.unflatten(-1, (3, 2, 16)).unbind(-3)
    )
    q, k, v = qkv.unflatten(-1, (3, 2, 16)).unbind(-3)
    for got, x, gain in zip((q, k), parts, gains, strict=False):
        assert error(got, rotated64(x, gain, own, (0, 0, 0), eps=1e-6)) <= TOLERANCE[F32]
    assert torch.equal(v, parts[2])


@pytest.mark.parametrize(("dtype", "size"), [(F32, 1e16), (F16, 3e4)], ids=str)
def test_large_values(interpreted, dtype, size):
    qkv = (randn(1, 2, 3, 5, 3 * 2 * 16).clamp(-2, 2) * size).to(dtype)
    gains, own = randn(2, 16, seed=1), frequencies(16)
    q = qkv.unflatten(-1, (3, 2, 16)).select(-3, 0)
    got = interpreted(fused_calls.norm_rotate_heads, qkv, gains, own, (0, 0, 0), eps=1e-6, head_dim=16, where="rows")
    assert error(got[0], rotated64(q, gains[0], own, (0, 0, 0), eps=1e-6)) <= TOLERANCE[dtype]


def test_strided_tensors_are_refused(interpreted):
    assert interpreted(fused_calls.is_interpreted)
    qkv, rows = randn(1, 2, 3, 5, 3 * 2 * 16), randn(1, 2, 6, 5, 3 * 2 * 16)[:, :, ::2]
    with pytest.raises(ValueError, match=r"the last stride must be 1; got strides \(.*, 2\)"):
        interpreted(fused_calls.heads_of, qkv, frequencies(16), strided=True)
    with pytest.raises(ValueError, match="qkv must be contiguous within a batch entry"):
        interpreted(fused_calls.heads_of, rows, frequencies(16))


@pytest.mark.parametrize("head_dim", [16, 32, 64])
def test_angles_are_those_of_diffusers(head_dim):
    """Bit for bit, also where a part of the grid begins further on."""
    whole = randn(1, 9, 13, 150, 2, head_dim)
    want = LTX2VideoVaeRotaryPosEmbed3D(head_dim)(whole)
    own = frequencies(head_dim)
    for starts, counts in (((0, 0, 0), (9, 13, 150)), ((3, 5, 120), (4, 1, 30))):
        part = tuple(slice(start, start + count) for start, count in zip(starts, counts, strict=True))
        angles = rotary(own, starts, counts)
        assert angles.split == tuple(len(f) for f in own)
        got = reference.rotate_pairs(whole[(slice(None), *part)], angles.table, angles.split, angles.firsts)
        assert torch.equal(got, want[(slice(None), *part)])


def scores(q, k, gains, angles):
    """bf16 heads (1, T, H, W, 1, head_dim) to fp32 scores of every q with every k."""
    count = q.shape[-1]
    q, k = (
        reference.norm_and_rotate(x, gain, angles.table, angles.split, angles.firsts, eps=1e-6).flatten(0, -2).float()
        for x, gain in ((q, gains[0] * count**-0.5), (k, gains[1]))
    )
    return q @ k.T


@pytest.mark.parametrize("head_dim", [16, 64])
def test_no_score_exceeds_the_bound(head_dim):
    """Random heads, and heads of few channels, at random gains; rounded to bf16 as the attention gets them."""
    angles = rotary(frequencies(head_dim), (0, 0, 0), (4, 8, 32))
    for seed in range(6):
        gains = randn(2, head_dim, seed=seed)
        q, k = (randn(1, 4, 8, 32, 1, head_dim, seed=seed + n) ** 5 for n in (10, 20))
        found = scores(q.bfloat16(), k.bfloat16(), gains, angles).abs().max().item()
        bound = softmax_bound(*gains).item()
        assert 0.3 * bound < found <= bound


@pytest.mark.parametrize("head_dim", [16, 64])
def test_the_bound_is_reached(head_dim):
    """By q and k of one channel each, in one pair, a quarter of a turn apart: the channels with the larger gains."""
    angles = _quarter_turns(head_dim)
    for seed in range(20):
        gains = randn(2, head_dim, seed=seed)
        pairs = gains.abs().unflatten(-1, (-1, 2))
        pair = int(pairs.amax(-1).prod(0).argmax())
        channels = [2 * pair + int(pairs[i, pair].argmax()) for i in range(2)]
        q, k = (torch.zeros(1, 4, 1, 1, 1, head_dim, dtype=torch.bfloat16) for _ in range(2))
        for x, channel in zip((q, k), channels, strict=True):
            x[..., channel] = 3
        found = scores(q, k, gains, angles).abs().max().item()
        bound = softmax_bound(*gains).item()
        assert 0.98 * bound < found <= bound


def _quarter_turns(head_dim):
    """All pairs turn with T."""
    angles = torch.cat((torch.arange(4.0) * math.pi / 2, torch.zeros(2)))[:, None].expand(6, head_dim // 2)
    return Rotary(torch.stack((angles.cos(), angles.sin())), (head_dim // 2, 0, 0), (0, 4, 5))


def test_the_bound_of_equal_gains_is_the_length_of_a_head():
    assert softmax_bound(torch.ones(64), torch.ones(64)).item() == pytest.approx(8 * heads._MARGIN)
    assert softmax_bound(torch.full((64,), -2.0), torch.ones(64).bfloat16()).item() == pytest.approx(16 * heads._MARGIN)
