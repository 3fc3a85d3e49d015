# mypy: disable-error-code="no-untyped-def"
"""Norm, modulation, the product for Q, K, V, their head norms and the rotary embedding of one tile of tokens.

The row norm is applied to the product, as in kernel_mlp.py; one block of the loop is one head.
"""

import triton
import triton.language as tl

from layers.fused.kernel_mlp import inverse_rms, tile_at, weights_at


@triton.jit
def rows_of(token, height, width, stride):
    """Offsets of the tokens (their index over T, H, W) in a tensor with these strides of (B, T, H, W, heads)."""
    frame, place = token // (height * width), token % (height * width)
    row, column = place // width, place % width
    return frame.to(tl.int64) * stride[1] + row.to(tl.int64) * stride[2] + column.to(tl.int64) * stride[3]


@triton.jit
def angles_of(
    table_ptr, table_rows, first_t, first_h, first_w, token, height, width,
    T_PAIRS: tl.constexpr, H_PAIRS: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """Cosine and sine (tokens, PAIRS) out of a table (2, table_rows, PAIRS): see heads.Rotary."""
    frame, place = token // (height * width), token % (height * width)
    pair = tl.arange(0, PAIRS)[None, :]
    row = first_w + (place % width)[:, None]
    row = tl.where(pair < T_PAIRS + H_PAIRS, first_h + (place // width)[:, None], row)
    row = tl.where(pair < T_PAIRS, first_t + frame[:, None], row)
    at = table_ptr + row * PAIRS + pair
    return tl.load(at), tl.load(at + table_rows * PAIRS)


@triton.jit
def turned(x, cos, sin, M: tl.constexpr, PAIRS: tl.constexpr):
    """Neighbouring channels of x (M, 2 * PAIRS) rotated by the angles."""
    even, odd = tl.split(tl.reshape(x, (M, PAIRS, 2)))
    return tl.reshape(tl.join(even * cos - odd * sin, even * sin + odd * cos), (M, 2 * PAIRS))


# Chunks have ever other lengths and places: a kernel for each would be compiled.
@triton.jit(do_not_specialize=["table_rows", "first_t", "first_h", "first_w", "frames", "height", "width"])
def qkv_kernel(
    x, pending_ptr, w, before_ptr, after_ptr, gain_ptr, table_ptr, table_rows, first_t, first_h, first_w,
    q_ptr, k_ptr, v_ptr, frames, height, width, eps, head_eps, q_stride, k_stride, v_stride,
    C: tl.constexpr, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, T_PAIRS: tl.constexpr, H_PAIRS: tl.constexpr,
    BLOCK_M: tl.constexpr, STAGES: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Q (scaled), K and V of the norm of x + pending; gain_ptr holds the head norms' gains (2, HEAD_DIM)."""
    first = tl.program_id(0) * BLOCK_M
    tokens = frames * height * width
    token = first + tl.arange(0, BLOCK_M)
    inside = (token < tokens)[:, None]
    token = tl.minimum(token, tokens - 1)
    dtype: tl.constexpr = q_ptr.dtype.element_ty
    tile = tile_at(x, first, tokens, BLOCK_M, C, TMA)
    factor = inverse_rms(tile.to(tl.float32) + tl.load(pending_ptr + tl.arange(0, C))[None, :], C, eps)[:, None]
    cos, sin = angles_of(
        table_ptr, table_rows, first_t, first_h, first_w, token, height, width, T_PAIRS, H_PAIRS, HEAD_DIM // 2
    )
    channel = tl.arange(0, HEAD_DIM)
    q_at = q_ptr + rows_of(token, height, width, q_stride)[:, None] + channel[None, :]
    k_at = k_ptr + rows_of(token, height, width, k_stride)[:, None] + channel[None, :]
    v_at = v_ptr + rows_of(token, height, width, v_stride)[:, None] + channel[None, :]
    for i in tl.range(0, 3 * HEADS, num_stages=STAGES):
        unit = i * HEAD_DIM + channel
        y = tl.dot(tile, weights_at(w, i * HEAD_DIM, HEAD_DIM, C, TMA).T) + tl.load(before_ptr + unit)[None, :]
        y = y * factor + tl.load(after_ptr + unit)[None, :]
        if i < 2 * HEADS:
            gain = tl.load(gain_ptr + (i // HEADS) * HEAD_DIM + channel)
            y = y * inverse_rms(y, HEAD_DIM, head_eps)[:, None] * gain[None, :]
            y = turned(y, cos, sin, BLOCK_M, HEAD_DIM // 2)
            if i < HEADS:
                tl.store(q_at + i * q_stride[4], y.to(dtype), mask=inside)
            else:
                tl.store(k_at + (i - HEADS) * k_stride[4], y.to(dtype), mask=inside)
        else:
            tl.store(v_at + (i - 2 * HEADS) * v_stride[4], y.to(dtype), mask=inside)
