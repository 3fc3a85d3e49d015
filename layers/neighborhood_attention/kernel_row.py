# mypy: disable-error-code="no-untyped-def"
"""Schedule `row`: BLOCK_Q queries along W at one (t, h) walk the KT x KH rows of keys around them.

The algorithm and the block sizes of AITER's published na3d kernel (ROCm/aiter#5230), written anew. A row of BLOCK_KV
keys covers the windows of all its queries, so one mask serves every row.
"""

import triton
import triton.language as tl

from layers.neighborhood_attention.kernel_math import GEOMETRY, HIDDEN, LOG2E, online_softmax, window_start


def _name(proxy) -> str:
    c = proxy.constants
    return f"na3d_row_q{c['BLOCK_Q']}_kv{c['BLOCK_KV']}_k{c['KT']}x{c['KH']}x{c['KW']}"


@triton.jit(do_not_specialize=[*GEOMETRY, "heads"], repr=_name)
def row_kernel(
    Q, K, V, OUT,
    t_offset, t_queries, t_keys, t_lowest, t_highest, h_offset, h_queries, h_keys, h_lowest, h_highest,
    w_offset, w_queries, w_keys, w_lowest, w_highest,
    heads, shift, q_strides, k_strides, v_strides, out_strides,
    KT: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr, BOUNDED: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Grid (T * H * blocks of W, batch * heads). Strides are (B, T, H, W, heads); `shift` only counts when BOUNDED."""
    axis_t = (t_offset, t_queries, t_keys, t_lowest, t_highest)
    axis_h = (h_offset, h_queries, h_keys, h_lowest, h_highest)
    axis_w = (w_offset, w_queries, w_keys, w_lowest, w_highest)
    blocks = tl.cdiv(axis_w[1], BLOCK_Q)
    pid = tl.program_id(0)
    b = tl.cast(tl.program_id(1) // heads, tl.int64)
    head = tl.cast(tl.program_id(1) % heads, tl.int64)
    w0 = (pid % blocks) * BLOCK_Q
    h = (pid // blocks) % axis_h[1]
    t = tl.cast(pid // (blocks * axis_h[1]), tl.int64)
    w = w0 + tl.arange(0, BLOCK_Q)
    w_read = tl.minimum(w, axis_w[1] - 1)
    d = tl.arange(0, HEAD_DIM)

    first_t = window_start(axis_t[0] + t, axis_t, KT)
    first_h = window_start(axis_h[0] + h, axis_h, KH)
    first_w = window_start(axis_w[0] + w0, axis_w, KW)
    start_w = window_start(axis_w[0] + w_read, axis_w, KW)
    key_w = first_w + tl.arange(0, BLOCK_KV)
    seen = (key_w[None, :] >= start_w[:, None]) & (key_w[None, :] < (start_w + KW)[:, None])
    key_w = tl.cast(tl.minimum(key_w, axis_w[2] - 1), tl.int64)

    q_row = Q + b * q_strides[0] + t * q_strides[1] + tl.cast(h, tl.int64) * q_strides[2] + head * q_strides[4]
    q = tl.load(q_row + (tl.cast(w_read, tl.int64) * q_strides[3])[:, None] + d[None, :])
    k_base = K + b * k_strides[0] + head * k_strides[4]
    v_base = V + b * v_strides[0] + head * v_strides[4]
    k_cell = (key_w * k_strides[3])[:, None] + d[None, :]
    v_cell = (key_w * v_strides[3])[:, None] + d[None, :]

    m = tl.full((BLOCK_Q,), -3e38, tl.float32)
    l = tl.zeros((BLOCK_Q,), tl.float32)
    acc = tl.zeros((BLOCK_Q, HEAD_DIM), tl.float32)
    for i in tl.range(0, KT * KH, num_stages=STAGES):
        key_t = tl.cast(first_t + i // KH, tl.int64)
        key_h = tl.cast(first_h + i % KH, tl.int64)
        k = tl.load(k_base + key_t * k_strides[1] + key_h * k_strides[2] + k_cell)
        v = tl.load(v_base + key_t * v_strides[1] + key_h * v_strides[2] + v_cell)
        s = tl.where(seen, tl.dot(q, tl.trans(k), input_precision="ieee") * LOG2E, HIDDEN)
        if BOUNDED:
            p = tl.exp2(s - shift)
            l += tl.sum(p, 1)
            acc = tl.dot(p.to(v.dtype), v, acc, input_precision="ieee")
        else:
            m, l, acc = online_softmax(s, m, l, acc, v)
    out_row = OUT + b * out_strides[0] + t * out_strides[1] + tl.cast(h, tl.int64) * out_strides[2]
    out_cell = head * out_strides[4] + (tl.cast(w_read, tl.int64) * out_strides[3])[:, None] + d[None, :]
    tl.store(out_row + out_cell, (acc / l[:, None]).to(q.dtype), mask=(w < axis_w[1])[:, None])
