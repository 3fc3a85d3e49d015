# mypy: disable-error-code="no-untyped-def"
"""Kernels that go over tokens or frames once: norms, head norms with rotary embedding, gated products, bytes."""

import triton
import triton.language as tl

from layers.fused.kernel_mlp import inverse_rms, silu_mul
from layers.fused.kernel_qkv import angles_of, rows_of, turned


@triton.jit
def norm_kernel(
    x_ptr, y_ptr, gain_ptr, scale_ptr, shift_ptr, out_ptr, tokens, eps, x_batch, y_batch, out_batch,
    C: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_M: tl.constexpr, ADDS: tl.constexpr, MODULATED: tl.constexpr,
):  # fmt: skip
    """out = rms_norm(x) * scale + shift; where ADDS, x += y first, in place."""
    batch = tl.program_id(1).to(tl.int64)
    first = tl.program_id(0) * BLOCK_M
    columns = tl.arange(0, BLOCK_C)
    local = tl.arange(0, BLOCK_M)[:, None] * C + columns[None, :]
    inside = (first + tl.arange(0, BLOCK_M) < tokens)[:, None] & (columns < C)[None, :]
    start = first.to(tl.int64) * C
    x_at = x_ptr + batch * x_batch + start + local
    x = tl.load(x_at, mask=inside, other=0.0)
    if ADDS:
        y = tl.load(y_ptr + batch * y_batch + start + local, mask=inside, other=0.0)
        x = (x.to(tl.float32) + y.to(tl.float32)).to(x.dtype)
        tl.store(x_at, x, mask=inside)
    x = x.to(tl.float32)
    real = columns < C
    x = x * inverse_rms(x, C, eps)[:, None] * tl.load(gain_ptr + columns, mask=real, other=0.0).to(tl.float32)[None, :]
    if MODULATED:
        x = x * tl.load(scale_ptr + batch * C + columns, mask=real, other=0.0).to(tl.float32)[None, :]
        x = x + tl.load(shift_ptr + batch * C + columns, mask=real, other=0.0).to(tl.float32)[None, :]
    tl.store(out_ptr + batch * out_batch + start + local, x.to(out_ptr.dtype.element_ty), mask=inside)


# Chunks have ever other lengths and places: a kernel for each would be compiled.
@triton.jit(do_not_specialize=["table_rows", "first_t", "first_h", "first_w", "frames", "height", "width"])
def heads_kernel(
    qkv_ptr, gain_ptr, table_ptr, table_rows, first_t, first_h, first_w, q_ptr, k_ptr, v_ptr,
    frames, height, width, eps,
    qkv_batch, q_stride, k_stride, v_stride,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, T_PAIRS: tl.constexpr, H_PAIRS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_HEADS: tl.constexpr,
):  # fmt: skip
    """Q (scaled), K, V out of (tokens, 3, HEADS, HEAD_DIM); out tensors may be views of the same memory."""
    first = tl.program_id(0) * BLOCK_M
    head = tl.program_id(1) * BLOCK_HEADS
    which, head = head // HEADS, head % HEADS
    batch = tl.program_id(2).to(tl.int64)
    token = first + tl.arange(0, BLOCK_M)
    inside = (token < frames * height * width)[:, None, None]
    token = tl.minimum(token, frames * height * width - 1)
    channel = tl.arange(0, HEAD_DIM)
    heads = tl.arange(0, BLOCK_HEADS)
    local = (tl.arange(0, BLOCK_M) * (3 * HEADS * HEAD_DIM))[:, None, None] + (heads * HEAD_DIM)[None, :, None]
    qkv_ptr += batch * qkv_batch + first.to(tl.int64) * (3 * HEADS * HEAD_DIM) + (which * HEADS + head) * HEAD_DIM
    y = tl.load(qkv_ptr + local + channel[None, None, :], mask=inside, other=0.0)
    if which < 2:
        y = tl.reshape(y.to(tl.float32), (BLOCK_M * BLOCK_HEADS, HEAD_DIM))
        y = y * inverse_rms(y, HEAD_DIM, eps)[:, None]
        y = y * tl.load(gain_ptr + which * HEAD_DIM + channel)[None, :]
        cos, sin = angles_of(
            table_ptr, table_rows, first_t, first_h, first_w, token, height, width, T_PAIRS, H_PAIRS, HEAD_DIM // 2
        )
        PAIRS: tl.constexpr = HEAD_DIM // 2
        cos = tl.reshape(
            tl.broadcast_to(cos[:, None, :], (BLOCK_M, BLOCK_HEADS, PAIRS)), (BLOCK_M * BLOCK_HEADS, PAIRS)
        )
        sin = tl.reshape(
            tl.broadcast_to(sin[:, None, :], (BLOCK_M, BLOCK_HEADS, PAIRS)), (BLOCK_M * BLOCK_HEADS, PAIRS)
        )
        y = turned(y, cos, sin, BLOCK_M * BLOCK_HEADS, PAIRS)
        y = tl.reshape(y, (BLOCK_M, BLOCK_HEADS, HEAD_DIM)).to(qkv_ptr.dtype.element_ty)
        if which == 0:
            at = q_ptr + (batch * q_stride[0] + rows_of(token, height, width, q_stride))[:, None, None]
            tl.store(at + ((head + heads) * q_stride[4])[None, :, None] + channel[None, None, :], y, mask=inside)
        else:
            at = k_ptr + (batch * k_stride[0] + rows_of(token, height, width, k_stride))[:, None, None]
            tl.store(at + ((head + heads) * k_stride[4])[None, :, None] + channel[None, None, :], y, mask=inside)
    else:
        at = v_ptr + (batch * v_stride[0] + rows_of(token, height, width, v_stride))[:, None, None]
        tl.store(at + ((head + heads) * v_stride[4])[None, :, None] + channel[None, None, :], y, mask=inside)


@triton.jit
def silu_mul_kernel(gate_ptr, up_ptr, count, BLOCK: tl.constexpr):
    """gate = silu(gate) * up in place."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    gate = tl.load(gate_ptr + at, mask=inside, other=0.0)
    up = tl.load(up_ptr + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(gate_ptr + at, silu_mul(gate.to(tl.float32), up, False).to(gate.dtype), mask=inside)


@triton.jit
def bytes_kernel(hidden_ptr, out_ptr, width, hidden_row, PATCH: tl.constexpr, BLOCK: tl.constexpr):
    """One row of pixels (PATCH * width, 3) as uint8, of a row of patches (width, 3 * PATCH * PATCH)."""
    row = tl.program_id(0).to(tl.int64)
    byte = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = byte < width * (3 * PATCH)
    patch, rest = byte // (3 * PATCH), byte % (3 * PATCH)
    # The channels of a patch are packed (colour, column, row): diffusers' _patchify.
    channel = (rest % 3) * (PATCH * PATCH) + (rest // 3) * PATCH + (row % PATCH).to(tl.int32)
    x = tl.load(
        hidden_ptr + (row // PATCH) * hidden_row + patch * (3 * PATCH * PATCH) + channel, mask=inside, other=0.0
    )
    x = tl.minimum(tl.maximum(x.to(tl.float32) * 0.5 + 0.5, 0.0), 1.0) * 255
    # Half to even, as torch.round: adding and taking away 1.5 * 2**23 rounds an fp32 to an integer.
    x = (x + 12582912.0) - 12582912.0
    tl.store(out_ptr + row * (width * (3 * PATCH)) + byte, x.to(tl.uint8), mask=inside)
