# mypy: disable-error-code="no-untyped-def"
"""Schedule `tile` for sm90: tile_kernel's walk and softmax, with the asynchronous steps in our own order.

Written in Gluon: Triton waits for every product, keeps two barriers a step and starts loads late. Here a step is
1. a wait for this step's K and V and one barrier, behind which the slots of the step before are free (a second barrier
   where a mask is written);
2. the mask and the score product, one chain of wgmmas. While it runs, the loads of the next step are started and, where
   the next step begins another block of cells, that block's mask is written;
3. the probabilities; 4. their product with V.
Steps are numbered through: the planes of one block of (h, w) cells, those of the next, then the cells left over
("rest"), packed over the planes.

Four programs share a multiprocessor at 128 registers, so what counts is every instruction: offsets are bytes in 32
bits, one-hot rows of queries lie in shared memory, the mask is made of 16-byte rows.
"""

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from layers.neighborhood_attention.kernel_math import (
    GEOMETRY,
    HIDDEN,
    block_name,
    cell_offsets,
    key_offsets,
    probabilities,
    union,
    window_start,
)

# Triton 3.9 has renamed it.
_copy = async_copy.async_load if hasattr(async_copy, "async_load") else async_copy.async_copy_global_to_shared


def _name(proxy) -> str:
    return f"na3d_tile_hopper_{block_name(proxy)}" + ("_checked" if proxy.constants["CHECKED"] else "_bounded")


@gluon.jit
def _offsets(
    slot, block, at, blocks, planes, room_h, room_w, strides,
    WIDTH: gl.constexpr, BLOCKS: gl.constexpr, REST: gl.constexpr,
):  # fmt: skip
    """(keys, head_dim) byte offsets of what goes into a slot.

    In whole blocks from the first cell of the step's plane, in the rest from the first cell of the union.
    """
    BLOCK_KV: gl.constexpr = slot.shape[0]
    HEAD_DIM: gl.constexpr = slot.shape[1]
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // HEAD_DIM, HEAD_DIM // 8], [4, 1], [1, 0])
    n = gl.arange(0, BLOCK_KV, gl.SliceLayout(1, layout))
    d = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, layout))[None, :]
    if block < blocks:
        cell = (block * BLOCK_KV + n).to(gl.uint32)
        plane = n * 0
    else:
        key = (at * BLOCK_KV + n).to(gl.uint32)
        cell = BLOCKS * BLOCK_KV + key % REST
        plane = gl.minimum((key // REST).to(gl.int32), planes - 1)
    cells = key_offsets((cell // WIDTH).to(gl.int32), (cell % WIDTH).to(gl.int32), room_h, room_w, strides, False)
    cells += plane * tl.cast(strides[1], tl.int32)
    return ((cells[:, None] + d) * (slot.dtype.primitive_bitwidth // 8)).to(gl.uint32)


@gluon.jit
def _load(slot, plane, offsets):
    """Start to copy. Addresses of 64 bits are put together here only."""
    x = plane.to(gl.pointer_type(gl.uint8), bitcast=True) + offsets.to(gl.int64)
    x = x.to(plane.dtype, bitcast=True)
    _copy(slot, gl.max_contiguous(gl.multiple_of(x, [1, 16]), [1, 8]))


@gluon.jit
def _write_mask(
    mask, block, at, blocks, start, layout: gl.constexpr, KT: gl.constexpr, KH: gl.constexpr, KW: gl.constexpr,
    QT: gl.constexpr, QH: gl.constexpr, QW: gl.constexpr, BLOCKS: gl.constexpr, REST: gl.constexpr,
):  # fmt: skip
    """(CHANNELS, keys): large and negative where the queries of the channel's row, column or plane do not see the key.

    start: each channel's first key, in the 3-D layout (channels, groups of keys, 8 keys). Planes only hide keys of the
    rest; in whole blocks `probabilities` hides them.
    """
    CHANNELS: gl.constexpr = mask.shape[0]
    BLOCK_KV: gl.constexpr = mask.shape[1]
    WIDTH: gl.constexpr = QW + KW - 1
    keys: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, layout))
    group = gl.arange(0, BLOCK_KV // 8, keys)[None, :, None] * 8
    j = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(1, layout)))[None, None, :]
    c = gl.arange(0, CHANNELS, gl.SliceLayout(1, gl.SliceLayout(2, layout)))[:, None, None]
    is_h = c < QH
    is_w = c < QH + QW
    if block < blocks:
        first = (block * BLOCK_KV + group).to(gl.uint32)  # of 8 keys, which one row's end divides at most
        key_w = (first % WIDTH).to(gl.int32)
        base = gl.where(is_h, (first // WIDTH).to(gl.int32), key_w) - start
        next_row = gl.where(key_w + j >= WIDTH, gl.where(is_h, 1, -WIDTH), 0)
        key = base + gl.where(is_h, 0, j) + next_row
        hidden = (key.to(gl.uint32) >= gl.where(is_h, KH, KW).to(gl.uint32)) & is_w
    else:
        n = (at * BLOCK_KV + group + j).to(gl.uint32)
        cell = BLOCKS * BLOCK_KV + n % REST
        key = gl.where(is_h, cell // WIDTH, gl.where(is_w, cell % WIDTH, n // REST)).to(gl.int32) - start
        size = gl.where(is_h, KH, gl.where(is_w, KW, KT))
        hidden = (key.to(gl.uint32) >= size.to(gl.uint32)) & (c < QH + QW + QT)
    x = gl.reshape(gl.where(hidden, HIDDEN, 0.0).to(mask.dtype), (CHANNELS, BLOCK_KV))
    rows: gl.constexpr = gl.BlockedLayout([1, 8], [256 // BLOCK_KV, BLOCK_KV // 8], [4, 1], [1, 0])
    mask.store(gl.convert_layout(x, rows, assert_trivial=True))
    fence_async_shared()


@gluon.jit(do_not_specialize=[*GEOMETRY, "heads"], repr=_name)
def tile_hopper_kernel(
    Q, K, V, OUT, FLAGS,
    t_offset, t_queries, t_keys, t_lowest, t_highest, h_offset, h_queries, h_keys, h_lowest, h_highest,
    w_offset, w_queries, w_keys, w_lowest, w_highest,
    heads, shift, q_strides, k_strides, v_strides, out_strides,
    KT: gl.constexpr, KH: gl.constexpr, KW: gl.constexpr, HEAD_DIM: gl.constexpr,
    QT: gl.constexpr, QH: gl.constexpr, QW: gl.constexpr, BLOCK_KV: gl.constexpr, CHANNELS: gl.constexpr,
    SAME_STRIDES: gl.constexpr, CHECKED: gl.constexpr, PAD_REST: gl.constexpr,
):  # fmt: skip
    """Grid (tiles along W, along H and T, batch * heads), four warps, 64 queries; arguments as for tile_kernel.

    64 queries, WIDTH at least 8, offsets within the union of less than 2**31 elements, every cell of K and V at a
    multiple of 16 bytes.
    """
    QUERIES: gl.constexpr = QT * QH * QW
    WIDTH: gl.constexpr = QW + KW - 1
    CELLS: gl.constexpr = (QH + KH - 1) * WIDTH
    BLOCKS: gl.constexpr = CELLS // BLOCK_KV + PAD_REST
    REST: gl.constexpr = CELLS - BLOCKS * BLOCK_KV if CELLS > BLOCKS * BLOCK_KV else 1
    dtype: gl.constexpr = Q.dtype.element_ty
    scores_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_KV, 16])
    out_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    q_layout: gl.constexpr = gl.DotOperandLayout(0, scores_layout, 2)
    p_layout: gl.constexpr = gl.DotOperandLayout(0, out_layout, 2)
    mask_layout: gl.constexpr = gl.BlockedLayout([1, 1, 8], [256 // BLOCK_KV, BLOCK_KV // 8, 1], [4, 1, 1], [2, 1, 0])
    slot_shared: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_KV, HEAD_DIM], dtype)
    mask_shared: gl.constexpr = gl.NVMMASharedLayout.get_default_for([CHANNELS, BLOCK_KV], dtype)
    hot_shared: gl.constexpr = gl.NVMMASharedLayout.get_default_for([QUERIES, CHANNELS], dtype)
    # Four buffers and not two of two: what a step loads and what it reads are then known to be apart.
    k0 = gl.allocate_shared_memory(dtype, [BLOCK_KV, HEAD_DIM], slot_shared)
    k1 = gl.allocate_shared_memory(dtype, [BLOCK_KV, HEAD_DIM], slot_shared)
    v0 = gl.allocate_shared_memory(dtype, [BLOCK_KV, HEAD_DIM], slot_shared)
    v1 = gl.allocate_shared_memory(dtype, [BLOCK_KV, HEAD_DIM], slot_shared)
    masks = gl.allocate_shared_memory(dtype, [2, CHANNELS, BLOCK_KV], mask_shared)

    axis_t = (t_offset, t_queries, t_keys, t_lowest, t_highest)
    axis_h = (h_offset, h_queries, h_keys, h_lowest, h_highest)
    axis_w = (w_offset, w_queries, w_keys, w_lowest, w_highest)
    b = tl.cast(gl.program_id(2) // heads, tl.int64)
    head = tl.cast(gl.program_id(2) % heads, tl.int64)
    rows_of_tiles = tl.cdiv(axis_h[1], QH)
    t0 = (gl.program_id(1) // rows_of_tiles) * QT
    h0 = (gl.program_id(1) % rows_of_tiles) * QH
    w0 = gl.program_id(0) * QW
    first_t, planes = union(t0, axis_t, QT, KT)
    first_h, rows = union(h0, axis_h, QH, KH)
    first_w, _ = union(w0, axis_w, QW, KW)
    room_h = axis_h[2] - 1 - first_h
    room_w = axis_w[2] - 1 - first_w
    blocks = gl.minimum(BLOCKS, (rows * WIDTH + BLOCK_KV - 1) // BLOCK_KV)
    rest_steps = gl.where(rows * WIDTH > BLOCKS * BLOCK_KV, (REST * planes + BLOCK_KV - 1) // BLOCK_KV, 0)
    steps = blocks * planes + rest_steps
    block = planes * 0
    at = planes * 0

    v_steps = k_strides if SAME_STRIDES else v_strides  # k's offsets then serve v: registers are scarce
    k_union = K + cell_offsets(b, head, first_t, first_h, first_w, k_strides)
    v_union = V + cell_offsets(b, head, first_t, first_h, first_w, v_steps)
    k_offsets = _offsets(k0, block, at, blocks, planes, room_h, room_w, k_strides, WIDTH, BLOCKS, REST)
    v_offsets = _offsets(v0, block, at, blocks, planes, room_h, room_w, v_steps, WIDTH, BLOCKS, REST)
    _load(k0, k_union, k_offsets)
    _load(v0, v_union, v_offsets)
    async_copy.commit_group()

    i = gl.arange(0, QUERIES, gl.SliceLayout(1, q_layout))
    d_q = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, q_layout))[None, :]
    t = gl.minimum(t0 + i // (QH * QW), axis_t[1] - 1)
    h = gl.minimum(h0 + (i // QW) % QH, axis_h[1] - 1)
    w = gl.minimum(w0 + i % QW, axis_w[1] - 1)
    q = gl.load((Q + cell_offsets(b, head, t, h, w, q_strides))[:, None] + d_q)
    hot_layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 * 8 // CHANNELS, CHANNELS // 8], [4, 1], [1, 0])
    i = gl.arange(0, QUERIES, gl.SliceLayout(1, hot_layout))[:, None]
    c = gl.arange(0, CHANNELS, gl.SliceLayout(0, hot_layout))[None, :]
    is_hot = (c == (i // QW) % QH) | (c == QH + i % QW) | (c == QH + QW + i // (QH * QW))
    one_hot = gl.allocate_shared_memory(dtype, [QUERIES, CHANNELS], hot_shared)
    one_hot.store(gl.where(is_hot, 1.0, 0.0).to(dtype))
    c = gl.arange(0, CHANNELS, gl.SliceLayout(1, gl.SliceLayout(2, mask_layout)))[:, None, None]
    start_h = window_start(axis_h[0] + gl.minimum(h0 + c, axis_h[1] - 1), axis_h, KH) - first_h
    start_w = window_start(axis_w[0] + gl.minimum(w0 + c - QH, axis_w[1] - 1), axis_w, KW) - first_w
    start_t = window_start(axis_t[0] + gl.minimum(t0 + c - QH - QW, axis_t[1] - 1), axis_t, KT) - first_t
    start = gl.where(c < QH, start_h, gl.where(c < QH + QW, start_w, start_t))
    _write_mask(masks.index(0), block, at, blocks, start, mask_layout, KT, KH, KW, QT, QH, QW, BLOCKS, REST)

    i = gl.arange(0, QUERIES, gl.SliceLayout(1, scores_layout))
    start_t = window_start(axis_t[0] + gl.minimum(t0 + i // (QH * QW), axis_t[1] - 1), axis_t, KT) - first_t
    zeros = gl.zeros((QUERIES, BLOCK_KV), gl.float32, scores_layout)
    l = gl.sum(gl.reshape(zeros, (QUERIES, BLOCK_KV // 8, 8)), 1)
    acc = gl.zeros((QUERIES, HEAD_DIM), gl.float32, out_layout)
    k_plane = k_union
    v_plane = v_union
    mask = planes * 0
    for pair in range((steps + 1) // 2):
        for odd in gl.static_range(2):
            if 2 * pair + odd < steps:
                async_copy.wait_group(0)  # and a barrier
                fence_async_shared()  # wgmma reads K and V by another way than they were written
                s = warpgroup_mma(one_hot, masks.index(mask), zeros, use_acc=False, is_async=True)
                s = warpgroup_mma(q, (k1 if odd else k0).permute((1, 0)), s, is_async=True)
                seen = ((at >= start_t) & (at < start_t + KT)) | (block == blocks)
                if 2 * pair + odd + 1 < steps:
                    at += 1
                    k_plane += k_strides[1]
                    v_plane += v_steps[1]
                    if (at == planes) | (block == blocks):
                        if block < blocks:
                            block += 1
                            at = planes * 0
                        k_plane = k_union
                        v_plane = v_union
                        k_offsets = _offsets(
                            k0, block, at, blocks, planes, room_h, room_w, k_strides, WIDTH, BLOCKS, REST
                        )  # fmt: skip
                        v_offsets = _offsets(
                            v0, block, at, blocks, planes, room_h, room_w, v_steps, WIDTH, BLOCKS, REST
                        )  # fmt: skip
                        mask = 1 - mask
                        _write_mask(
                            masks.index(mask), block, at, blocks, start, mask_layout,
                            KT, KH, KW, QT, QH, QW, BLOCKS, REST,
                        )  # fmt: skip
                    _load(k0 if odd else k1, k_plane, k_offsets)
                    _load(v0 if odd else v1, v_plane, v_offsets)
                    async_copy.commit_group()
                s = warpgroup_mma_wait(0, deps=[s])
                p = probabilities(s, shift, seen, QUERIES * BLOCK_KV // 128)
                l += gl.sum(gl.reshape(p, (QUERIES, BLOCK_KV // 8, 8)), 1)
                acc = warpgroup_mma(
                    gl.convert_layout(p.to(dtype), p_layout), v1 if odd else v0, acc, is_async=True
                )  # fmt: skip
                acc = warpgroup_mma_wait(0, deps=[acc])

    if steps == 0:
        # Never so, but q must live past the loop. Otherwise ptxas 12.8 to 13.0 gives the registers of a loop-invariant
        # wgmma operand A to the probabilities and the scores are wrong (test_na_compile.py looks for it).
        gl.store(OUT + (gl.arange(0, QUERIES, gl.SliceLayout(1, q_layout))[:, None] + d_q), q)

    sums = gl.convert_layout(gl.sum(l, 1), gl.SliceLayout(1, out_layout))
    i = gl.arange(0, QUERIES, gl.SliceLayout(1, out_layout))
    t = t0 + i // (QH * QW)
    h = h0 + (i // QW) % QH
    w = w0 + i % QW
    exists = (t < axis_t[1]) & (h < axis_h[1]) & (w < axis_w[1])
    if CHECKED:
        good = (sums > 2.0**-64) & (sums < 2.0**64)  # also false for NaN
        tile = gl.program_id(1) * gl.num_programs(0) + gl.program_id(0)
        flags = FLAGS + tl.cast(gl.program_id(2), tl.int64) * (gl.num_programs(0) * gl.num_programs(1))
        gl.store(flags + tile, gl.max(gl.where(good, 0, 1), 0))
    d_out = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, out_layout))[None, :]
    out = (OUT + cell_offsets(b, head, t, h, w, out_strides))[:, None] + d_out
    gl.store(out, (acc * (1.0 / sums)[:, None]).to(dtype), mask=exists[:, None])
