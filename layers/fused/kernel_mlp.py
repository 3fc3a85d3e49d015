# mypy: disable-error-code="no-untyped-def"
"""Norm, modulation, gated MLP and residual of one tile of tokens, the hidden activations in registers.

A row's norm is one factor, so it commutes with the product: the kernel multiplies the tokens as they lie in memory by
weights that carry gain, scale and shift (packing.py), and applies the factor to the product, in fp32.
"""

import triton
import triton.language as tl


@triton.jit
def inverse_rms(x, shift_ptr, columns, eps, C: tl.constexpr):
    """1 / RMS of the rows of x (n, C) + shift (C,), fp32."""
    x = x.to(tl.float32) + tl.load(shift_ptr + columns)[None, :]
    return tl.rsqrt(tl.sum(x * x, axis=1) / C + eps)


@triton.jit
def mlp_kernel(
    x_ptr, pending_ptr, w_in_ptr, before_ptr, after_ptr, w_down_ptr,
    tokens, eps, batch_stride,
    C: tl.constexpr, HIDDEN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_H: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """x += pending + w_down(silu(gate) * up) in place."""
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.arange(0, C)
    dtype = x_ptr.dtype.element_ty
    x_ptr += tl.program_id(1).to(tl.int64) * batch_stride + (tl.program_id(0) * BLOCK_M).to(tl.int64) * C
    at = x_ptr + tl.arange(0, BLOCK_M)[:, None] * C + columns[None, :]
    inside = rows[:, None] < tokens
    x = tl.load(at, mask=inside, other=0.0)
    factor = inverse_rms(x, pending_ptr, columns, eps, C)[:, None]
    units = tl.arange(0, BLOCK_H)
    both = tl.arange(0, 2 * BLOCK_H)
    w_in = w_in_ptr + both[None, :] * C + columns[:, None]
    w_down = w_down_ptr + units[:, None] * C + columns[None, :]
    before = before_ptr + both
    after = after_ptr + both
    out = x.to(tl.float32) + tl.load(pending_ptr + columns)[None, :]
    for _ in tl.range(0, HIDDEN, BLOCK_H, num_stages=STAGES):
        hidden = (tl.dot(x, tl.load(w_in)) + tl.load(before)[None, :]) * factor + tl.load(after)[None, :]
        gate, up = tl.split(tl.trans(tl.reshape(hidden, (BLOCK_M, 2, BLOCK_H)), (0, 2, 1)))
        hidden = (gate * tl.sigmoid(gate) * up).to(dtype)
        out = tl.dot(hidden, tl.load(w_down), out)
        w_in += 2 * BLOCK_H * C
        w_down += BLOCK_H * C
        before += 2 * BLOCK_H
        after += 2 * BLOCK_H
    tl.store(at, out.to(dtype), mask=inside)
