# mypy: disable-error-code="no-untyped-def"
"""Schedule `tile`: one program owns a 3-D block of queries of one head and walks the union of their windows.

The (h, w) cells of the union are taken in blocks of BLOCK_KV; for each block the loop runs over the T planes of the
union. Key offsets and the (h, w) mask are made once per block; a plane costs one pointer step and one predicate per
query row. The (h, w) mask is a product on the tensor cores: one-hot(row and column of the query) x bias(row and column
misses the key). Cells left over after whole blocks are packed over the planes ("rest").

Two softmaxes. `tile_kernel` has no running maximum: p = 2**(s - shift) with a constant shift. bf16 has fp32's
exponents, so the result is right while row sums stay within 2**+-64; CHECKED raises a flag for a tile outside, and
`tile_exact_kernel` computes flagged tiles again with a running maximum. A caller's bound on the scores makes the check
unnecessary. fp16 always takes `tile_exact_kernel`.
"""

import triton
import triton.language as tl

from layers.neighborhood_attention.kernel_math import (
    GEOMETRY,
    HIDDEN,
    LOG2E,
    block_name,
    cell_offsets,
    key_offsets,
    online_softmax,
    probabilities,
    union,
    window_start,
)


def _name(proxy) -> str:
    if "SCAN" in proxy.constants:
        return f"na3d_tile_exact_{block_name(proxy)}"
    return f"na3d_tile_{block_name(proxy)}" + ("_checked" if proxy.constants["CHECKED"] else "_bounded")


@triton.jit
def _tile_of(pid, axis_t, axis_h, axis_w, QT: tl.constexpr, QH: tl.constexpr, QW: tl.constexpr):
    """Index of the tile's first query on each axis."""
    columns = tl.cdiv(axis_w[1], QW)
    rows = tl.cdiv(axis_h[1], QH)
    return (pid // (rows * columns)) * QT, ((pid // columns) % rows) * QH, (pid % columns) * QW


@triton.jit
def _queries(t0, h0, w0, axis_t, axis_h, axis_w, QT: tl.constexpr, QH: tl.constexpr, QW: tl.constexpr):
    """Indices of the tile's queries, clamped to what exists, and which of them exist."""
    i = tl.arange(0, QT * QH * QW)
    t = t0 + i // (QH * QW)
    h = h0 + (i // QW) % QH
    w = w0 + i % QW
    exists = (t < axis_t[1]) & (h < axis_h[1]) & (w < axis_w[1])
    return tl.minimum(t, axis_t[1] - 1), tl.minimum(h, axis_h[1] - 1), tl.minimum(w, axis_w[1] - 1), exists


@triton.jit
def _one_hot(dtype: tl.constexpr, QT: tl.constexpr, QH: tl.constexpr, QW: tl.constexpr, CHANNELS: tl.constexpr):
    """(queries, CHANNELS): channel h for the query's row in the tile, channel QH + w for its column."""
    i = tl.arange(0, QT * QH * QW)[:, None]
    c = tl.arange(0, CHANNELS)[None, :]
    return tl.where((c == (i // QW) % QH) | (c == QH + i % QW), 1.0, 0.0).to(dtype)


@triton.jit
def _mask_bias(
    key_h, key_w, h0, w0, first_h, first_w, axis_h, axis_w,
    dtype: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, QH: tl.constexpr, QW: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """(CHANNELS, keys): large and negative where the channel's row or column of queries does not see the key.

    key_h, key_w count from the union's first cell.
    """
    c = tl.arange(0, CHANNELS)
    is_h = c < QH
    start_h = window_start(axis_h[0] + tl.minimum(h0 + c, axis_h[1] - 1), axis_h, KH) - first_h
    start_w = window_start(axis_w[0] + tl.minimum(w0 + c - QH, axis_w[1] - 1), axis_w, KW) - first_w
    start = tl.where(is_h, start_h, start_w)[:, None]
    size = tl.where(is_h, KH, KW)[:, None]
    key = tl.where(is_h[:, None], key_h[None, :], key_w[None, :])
    hidden = ((key < start) | (key >= start + size)) & (c < QH + QW)[:, None]
    NEGATIVE: tl.constexpr = -60000.0 if dtype == tl.float16 else HIDDEN
    return tl.where(hidden, NEGATIVE, 0.0).to(dtype)


@triton.jit
def _add(l, acc, p, v, PARTIAL_SUMS: tl.constexpr):
    """Add one block of probabilities to the row sums and the accumulator."""
    if PARTIAL_SUMS:
        l += tl.sum(tl.reshape(p, (p.shape[0], p.shape[1] // 8, 8)), 1)
    else:
        l += tl.sum(p, 1)
    return l, tl.dot(p.to(v.dtype), v, acc, input_precision="ieee")


@triton.jit(do_not_specialize=[*GEOMETRY, "heads"], repr=_name)
def tile_kernel(
    Q, K, V, OUT, FLAGS,
    t_offset, t_queries, t_keys, t_lowest, t_highest, h_offset, h_queries, h_keys, h_lowest, h_highest,
    w_offset, w_queries, w_keys, w_lowest, w_highest,
    heads, shift, q_strides, k_strides, v_strides, out_strides,
    KT: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, HEAD_DIM: tl.constexpr,
    QT: tl.constexpr, QH: tl.constexpr, QW: tl.constexpr, BLOCK_KV: tl.constexpr, CHANNELS: tl.constexpr, SAME_STRIDES:
    tl.constexpr, CHECKED: tl.constexpr, WIDE: tl.constexpr, PAD_REST: tl.constexpr,
    SKIP_EXP: tl.constexpr, PARTIAL_SUMS: tl.constexpr, Q_IN_REGISTERS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Grid (tiles, batch * heads). Strides are (B, T, H, W, heads). FLAGS (batch * heads, tiles) int32 if CHECKED."""
    axis_t = (t_offset, t_queries, t_keys, t_lowest, t_highest)
    axis_h = (h_offset, h_queries, h_keys, h_lowest, h_highest)
    axis_w = (w_offset, w_queries, w_keys, w_lowest, w_highest)
    QUERIES: tl.constexpr = QT * QH * QW
    WIDTH: tl.constexpr = QW + KW - 1
    CELLS: tl.constexpr = (QH + KH - 1) * WIDTH
    BLOCKS: tl.constexpr = CELLS // BLOCK_KV + PAD_REST
    REST: tl.constexpr = CELLS - BLOCKS * BLOCK_KV if CELLS > BLOCKS * BLOCK_KV else 1
    dtype: tl.constexpr = Q.dtype.element_ty
    pid = tl.program_id(0)
    b = tl.cast(tl.program_id(1) // heads, tl.int64)
    head = tl.cast(tl.program_id(1) % heads, tl.int64)
    t0, h0, w0 = _tile_of(pid, axis_t, axis_h, axis_w, QT, QH, QW)
    first_t, planes = union(t0, axis_t, QT, KT)
    first_h, rows = union(h0, axis_h, QH, KH)
    first_w, _ = union(w0, axis_w, QW, KW)
    t, h, w, exists = _queries(t0, h0, w0, axis_t, axis_h, axis_w, QT, QH, QW)
    d = tl.arange(0, HEAD_DIM)
    q = tl.load(Q + cell_offsets(b, head, t, h, w, q_strides)[:, None] + d[None, :])
    if Q_IN_REGISTERS:
        # q times the identity is q in the accumulator's layout: the score product then reads it from registers, which
        # frees its shared memory for a fourth program on the multiprocessor: 20.9 -> 17.8 ms at 79x192x192 on H200.
        q = tl.dot(q, tl.where(d[:, None] == d[None, :], 1.0, 0.0).to(dtype)).to(dtype)
    start_t = window_start(axis_t[0] + t, axis_t, KT) - first_t
    q_mask = _one_hot(dtype, QT, QH, QW, CHANNELS)
    k_union = K + cell_offsets(b, head, first_t, first_h, first_w, k_strides)
    v_steps = k_strides if SAME_STRIDES else v_strides  # k's offsets then serve v: registers are scarce
    v_union = V + cell_offsets(b, head, first_t, first_h, first_w, v_steps)
    room_h = axis_h[2] - 1 - first_h
    room_w = axis_w[2] - 1 - first_w
    n = tl.arange(0, BLOCK_KV)
    l = tl.zeros((QUERIES, 8) if PARTIAL_SUMS else (QUERIES,), tl.float32)
    acc = tl.zeros((QUERIES, HEAD_DIM), tl.float32)

    for block in range(tl.minimum(BLOCKS, tl.cdiv(rows * WIDTH, BLOCK_KV))):
        cell = block * BLOCK_KV + n
        key_h = cell // WIDTH
        key_w = cell % WIDTH
        k_cells = key_offsets(key_h, key_w, room_h, room_w, k_strides, WIDE)[:, None] + d[None, :]
        v_cells = key_offsets(key_h, key_w, room_h, room_w, v_steps, WIDE)[:, None] + d[None, :]
        k_mask = _mask_bias(
            key_h, key_w, h0, w0, first_h, first_w, axis_h, axis_w, dtype, KH, KW, QH, QW, CHANNELS
        )  # fmt: skip
        for plane in tl.range(0, planes, num_stages=STAGES):
            k = tl.load(k_union + tl.cast(plane, tl.int64) * k_strides[1] + k_cells)
            s = tl.dot(q_mask, k_mask, input_precision="ieee")
            s = tl.dot(q, tl.trans(k), s, input_precision="ieee")
            p = probabilities(s, shift, (plane >= start_t) & (plane < start_t + KT), SKIP_EXP)
            v = tl.load(v_union + tl.cast(plane, tl.int64) * v_steps[1] + v_cells)
            l, acc = _add(l, acc, p, v, PARTIAL_SUMS)

    # This loop also stays where there is no rest (zero trips, decided at run time): q and q_mask must live past the
    # loops above. Otherwise ptxas 12.8 to 13.0 gives the registers of a loop-invariant wgmma operand A to the
    # probabilities and the scores are wrong. test_na_compile.py looks for it in the machine code.
    rest = tl.where(rows * WIDTH > BLOCKS * BLOCK_KV, planes * REST, 0)
    REST_STAGES: tl.constexpr = STAGES if REST * (KT + QT - 1) > BLOCK_KV else 1
    for first in tl.range(0, rest, BLOCK_KV, num_stages=REST_STAGES):
        i = first + n
        plane = i // REST
        cell = BLOCKS * BLOCK_KV + i % REST
        key_h = cell // WIDTH
        key_w = cell % WIDTH
        k_plane = tl.cast(tl.minimum(plane, planes - 1), tl.int64)
        k_cells = k_plane * k_strides[1] + key_offsets(key_h, key_w, room_h, room_w, k_strides, WIDE)
        v_cells = k_plane * v_steps[1] + key_offsets(key_h, key_w, room_h, room_w, v_steps, WIDE)
        k = tl.load(k_union + k_cells[:, None] + d[None, :])
        v = tl.load(v_union + v_cells[:, None] + d[None, :])
        k_mask = _mask_bias(
            key_h, key_w, h0, w0, first_h, first_w, axis_h, axis_w, dtype, KH, KW, QH, QW, CHANNELS
        )  # fmt: skip
        s = tl.dot(q_mask, k_mask, input_precision="ieee")
        s = tl.dot(q, tl.trans(k), s, input_precision="ieee")
        seen = (plane[None, :] >= start_t[:, None]) & (plane[None, :] < (start_t + KT)[:, None])
        p = tl.exp2(tl.where(seen, s * LOG2E - shift, HIDDEN))
        l, acc = _add(l, acc, p, v, PARTIAL_SUMS)

    if PARTIAL_SUMS:
        l = tl.sum(l, 1)
    if CHECKED:
        good = (l > 2.0**-64) & (l < 2.0**64)  # also false for NaN
        flag = tl.max(tl.where(good, 0, 1), 0)
        tl.store(FLAGS + tl.cast(tl.program_id(1), tl.int64) * tl.num_programs(0) + pid, flag)
    cells = cell_offsets(b, head, t, h, w, out_strides)[:, None] + d[None, :]
    tl.store(OUT + cells, (acc * (1.0 / l)[:, None]).to(dtype), mask=exists[:, None])


@triton.jit
def _exact_tile(
    pid, Q, K, V, OUT, axis_t, axis_h, axis_w, b, head, q_strides, k_strides, v_strides, out_strides,
    KT: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, HEAD_DIM: tl.constexpr,
    QT: tl.constexpr, QH: tl.constexpr, QW: tl.constexpr, BLOCK_KV: tl.constexpr, CHANNELS: tl.constexpr, SAME_STRIDES:
    tl.constexpr, WIDE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One tile with a running maximum; the walk is tile_kernel's, without packing the rest."""
    QUERIES: tl.constexpr = QT * QH * QW
    WIDTH: tl.constexpr = QW + KW - 1
    dtype: tl.constexpr = Q.dtype.element_ty
    t0, h0, w0 = _tile_of(pid, axis_t, axis_h, axis_w, QT, QH, QW)
    first_t, planes = union(t0, axis_t, QT, KT)
    first_h, rows = union(h0, axis_h, QH, KH)
    first_w, _ = union(w0, axis_w, QW, KW)
    t, h, w, exists = _queries(t0, h0, w0, axis_t, axis_h, axis_w, QT, QH, QW)
    d = tl.arange(0, HEAD_DIM)
    q = tl.load(Q + cell_offsets(b, head, t, h, w, q_strides)[:, None] + d[None, :])
    start_t = window_start(axis_t[0] + t, axis_t, KT) - first_t
    q_mask = _one_hot(dtype, QT, QH, QW, CHANNELS)
    k_union = K + cell_offsets(b, head, first_t, first_h, first_w, k_strides)
    v_steps = k_strides if SAME_STRIDES else v_strides  # k's offsets then serve v: registers are scarce
    v_union = V + cell_offsets(b, head, first_t, first_h, first_w, v_steps)
    n = tl.arange(0, BLOCK_KV)
    m = tl.full((QUERIES,), -3e38, tl.float32)
    l = tl.zeros((QUERIES,), tl.float32)
    acc = tl.zeros((QUERIES, HEAD_DIM), tl.float32)
    for block in range(tl.cdiv(rows * WIDTH, BLOCK_KV)):
        key_h = (block * BLOCK_KV + n) // WIDTH
        key_w = (block * BLOCK_KV + n) % WIDTH
        room_h = axis_h[2] - 1 - first_h
        room_w = axis_w[2] - 1 - first_w
        k_cells = key_offsets(key_h, key_w, room_h, room_w, k_strides, WIDE)[:, None] + d[None, :]
        v_cells = key_offsets(key_h, key_w, room_h, room_w, v_steps, WIDE)[:, None] + d[None, :]
        k_mask = _mask_bias(
            key_h, key_w, h0, w0, first_h, first_w, axis_h, axis_w, dtype, KH, KW, QH, QW, CHANNELS
        )  # fmt: skip
        for plane in tl.range(0, planes, num_stages=STAGES):
            k = tl.load(k_union + tl.cast(plane, tl.int64) * k_strides[1] + k_cells)
            s = tl.dot(q_mask, k_mask, input_precision="ieee")
            s = tl.dot(q, tl.trans(k), s, input_precision="ieee")
            seen = (plane >= start_t) & (plane < start_t + KT)
            s = s * LOG2E + tl.where(seen, 0.0, HIDDEN)[:, None]
            v = tl.load(v_union + tl.cast(plane, tl.int64) * v_steps[1] + v_cells)
            m, l, acc = online_softmax(s, m, l, acc, v)
    cells = cell_offsets(b, head, t, h, w, out_strides)[:, None] + d[None, :]
    tl.store(OUT + cells, (acc * (1.0 / l)[:, None]).to(dtype), mask=exists[:, None])


@triton.jit(do_not_specialize=["tiles", *GEOMETRY, "heads"], repr=_name)
def tile_exact_kernel(
    Q, K, V, OUT, FLAGS, tiles,
    t_offset, t_queries, t_keys, t_lowest, t_highest, h_offset, h_queries, h_keys, h_lowest, h_highest,
    w_offset, w_queries, w_keys, w_lowest, w_highest,
    heads, q_strides, k_strides, v_strides, out_strides,
    KT: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, HEAD_DIM: tl.constexpr,
    QT: tl.constexpr, QH: tl.constexpr, QW: tl.constexpr, BLOCK_KV: tl.constexpr, CHANNELS: tl.constexpr, SAME_STRIDES:
    tl.constexpr, WIDE: tl.constexpr, SCAN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Grid (cdiv(tiles, SCAN), batch * heads): a program computes the flagged of SCAN tiles; SCAN 0: its own tile."""
    axis_t = (t_offset, t_queries, t_keys, t_lowest, t_highest)
    axis_h = (h_offset, h_queries, h_keys, h_lowest, h_highest)
    axis_w = (w_offset, w_queries, w_keys, w_lowest, w_highest)
    pid = tl.program_id(0)
    b = tl.cast(tl.program_id(1) // heads, tl.int64)
    head = tl.cast(tl.program_id(1) % heads, tl.int64)
    if SCAN == 0:
        _exact_tile(
            pid, Q, K, V, OUT, axis_t, axis_h, axis_w, b, head, q_strides, k_strides, v_strides, out_strides,
            KT, KH, KW, HEAD_DIM, QT, QH, QW, BLOCK_KV, CHANNELS, SAME_STRIDES, WIDE, STAGES,
        )  # fmt: skip
    else:
        flags = FLAGS + tl.cast(tl.program_id(1), tl.int64) * tiles
        scanned = pid * SCAN + tl.arange(0, SCAN)
        if tl.max(tl.load(flags + scanned, mask=scanned < tiles, other=0), 0) > 0:
            for tile in range(pid * SCAN, tl.minimum(pid * SCAN + SCAN, tiles)):
                if tl.load(flags + tile) > 0:
                    _exact_tile(
                        tile, Q, K, V, OUT, axis_t, axis_h, axis_w, b, head,
                        q_strides, k_strides, v_strides, out_strides,
                        KT, KH, KW, HEAD_DIM, QT, QH, QW, BLOCK_KV, CHANNELS, SAME_STRIDES, WIDE, STAGES,
                    )  # fmt: skip
