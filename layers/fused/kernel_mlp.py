# mypy: disable-error-code="no-untyped-def"
"""Norm, modulation, gated MLP and residual of one tile of tokens, the hidden activations in registers.

A row's norm is one factor, so it commutes with the product: the kernel multiplies the tokens as they lie in memory by
weights that carry gain, scale and shift (narrow.py), and applies the factor to the product, in fp32. Tensors are
(rows, C); with TMA they come as descriptors, else as pointers.
"""

import triton
import triton.language as tl


@triton.jit
def tile_at(source, row, count, ROWS: tl.constexpr, C: tl.constexpr, TMA: tl.constexpr):
    """Rows [row, row + ROWS) of (count, C); zeros past the end."""
    if TMA:
        tile = source.load([row, 0])
    else:
        local = tl.arange(0, ROWS)
        at = source + row.to(tl.int64) * C + local[:, None] * C + tl.arange(0, C)[None, :]
        tile = tl.load(at, mask=(row + local < count)[:, None], other=0)
    return tile


@triton.jit
def weights_at(source, row, ROWS: tl.constexpr, C: tl.constexpr, TMA: tl.constexpr):
    """Rows [row, row + ROWS) of a matrix that has them all."""
    if TMA:
        tile = source.load([row, 0])
    else:
        tile = tl.load(source + (row + tl.arange(0, ROWS))[:, None] * C + tl.arange(0, C)[None, :])
    return tile


@triton.jit
def inverse_rms(x, C: tl.constexpr, eps):
    """1 / RMS of the rows of x (n, C), fp32."""
    return tl.rsqrt(tl.sum(x * x, axis=1) / C + eps)


@triton.jit
def silu_mul(gate, up, PTX: tl.constexpr):
    """silu(gate) * up, fp32."""
    if PTX:  # two thirds of the instructions: the compiler's exp and division take care of denormal numbers
        product = tl.inline_asm_elementwise(
            """{
            .reg .f32 t;
            mul.ftz.f32 t, $1, 0fBFB8AA3B;
            ex2.approx.ftz.f32 t, t;
            add.ftz.f32 t, t, 0f3F800000;
            rcp.approx.ftz.f32 t, t;
            mul.ftz.f32 t, t, $1;
            mul.ftz.f32 $0, t, $2;
            }""",
            "=f,f,f", [gate, up], dtype=tl.float32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        product = gate * tl.sigmoid(gate) * up
    return product


@triton.jit(do_not_specialize=["tokens"])
def mlp_kernel(
    x, pending_ptr, w_in, before_ptr, after_ptr, w_down, out_ptr, tokens, eps,
    C: tl.constexpr, HIDDEN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_H: tl.constexpr, STAGES: tl.constexpr,
    TMA: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """x += pending + w_down(silu(gate) * up) in place; out_ptr is x as a pointer."""
    first = tl.program_id(0) * BLOCK_M
    columns = tl.arange(0, C)
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    tile = tile_at(x, first, tokens, BLOCK_M, C, TMA)
    out = tile.to(tl.float32) + tl.load(pending_ptr + columns)[None, :]
    factor = inverse_rms(out, C, eps)[:, None]
    both = tl.arange(0, 2 * BLOCK_H)
    for unit in tl.range(0, HIDDEN, BLOCK_H, num_stages=STAGES):
        before = tl.load(before_ptr + 2 * unit + both)[None, :]
        hidden = tl.dot(tile, weights_at(w_in, 2 * unit, 2 * BLOCK_H, C, TMA).T) + before
        hidden = hidden * factor + tl.load(after_ptr + 2 * unit + both)[None, :]
        gate, up = tl.split(tl.trans(tl.reshape(hidden, (BLOCK_M, 2, BLOCK_H)), (0, 2, 1)))
        hidden = silu_mul(gate, up, PTX).to(dtype)
        out = tl.dot(hidden, weights_at(w_down, unit, BLOCK_H, C, TMA), out)
    if TMA:
        x.store([first, 0], out.to(dtype))
    else:
        local = tl.arange(0, BLOCK_M)
        out_ptr += first.to(tl.int64) * C
        tl.store(out_ptr + local[:, None] * C + columns[None, :], out.to(dtype), mask=(first + local < tokens)[:, None])
