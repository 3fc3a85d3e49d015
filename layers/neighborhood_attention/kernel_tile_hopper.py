# mypy: disable-error-code="no-untyped-def"
"""Schedule `tile` for sm90: programs that walk along one axis, from tile to tile of queries.

The axis walked along is the kernel's first, T below; the caller may permute axes. A program keeps its place in (h, w),
so that the offsets and masks of a plane's blocks of keys are made once, and takes plane after plane. Each tile is
KT + 1 queries on from the last where that is a multiple of QT (the tiles between belong to other programs). The planes
of two such tiles overlap by QT - 2, and no plane is walked twice: in the overlap the early half of the rows
(t < QT / 2) already holds the next tile's queries, the late half still the last tile's. For k=11 that is 12 planes a
tile instead of 14. Where windows are shifted inward and overlap by more, a tile begins when the last one is through.
Cells left over after a plane's whole blocks ("rest") are packed over the planes of a tile, one step while the tile has
all rows.

Written in Gluon: Triton waits for every product and starts loads late. Here a step is
1. a wait for this step's K and V, a barrier, behind which the slots of the step before are free, and the next loads;
2. the mask and the score product, one chain of wgmmas;
3. the probabilities; 4. their product with V.

Four programs share a multiprocessor at 128 registers. Offsets are bytes in 32 bits and lie in shared memory with the
masks and the one-hot rows of queries.
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
# Where a tile's flag lies: steps from tile to tile along each axis, and from head to head.
FLAG_STEPS = ["flag_t", "flag_h", "flag_w", "flag_head"]


def _name(proxy) -> str:
    return f"na3d_tile_hopper_{block_name(proxy)}" + ("_checked" if proxy.constants["CHECKED"] else "_bounded")


@gluon.jit
def _plan(t0, ahead, stop, axis, QT: gl.constexpr, KT: gl.constexpr):
    """Of the tile at t0: its first plane, the plane where the next tile (`ahead` queries on) takes over, its last + 1.

    The next tile takes over early where by then the early half of the rows has seen all its planes, and the late half
    of the next tile needs none of the planes that this one still does.
    """
    last = axis[1] - 1
    first = window_start(axis[0] + t0, axis, KT)
    early_end = window_start(axis[0] + gl.minimum(t0 + QT // 2 - 1, last), axis, KT) + KT
    end = window_start(axis[0] + gl.minimum(t0 + QT - 1, last), axis, KT) + KT
    following = window_start(axis[0] + gl.minimum(t0 + ahead, last), axis, KT)
    late = window_start(axis[0] + gl.minimum(t0 + ahead + QT // 2, last), axis, KT)
    shares = (t0 + ahead < stop) & (early_end <= following) & (following < end) & (end <= late)
    return first, gl.where(shares, following, end), end


@gluon.jit
def _turns(turn, QUERIES: gl.constexpr, layout: gl.constexpr):
    """(rows,): which change to another tile: 1 the early half, 2 the late half, 3 all."""
    i = gl.arange(0, QUERIES, gl.SliceLayout(1, layout))
    return gl.where(i < QUERIES // 2, turn & 1, turn & 2) > 0


@gluon.jit
def _queries(i, place, TILE: gl.constexpr):
    """t, h, w of rows i of the tile at `place`."""
    t = place[0] + i // (TILE[1] * TILE[2])
    return t, place[1] + (i // TILE[2]) % TILE[1], place[2] + i % TILE[2]


@gluon.jit
def _first_planes(t0, axis, layout: gl.constexpr, KT: gl.constexpr, TILE: gl.constexpr):
    """(rows,): the first plane that each row's query sees."""
    QUERIES: gl.constexpr = TILE[0] * TILE[1] * TILE[2]
    t = t0 + gl.arange(0, QUERIES, gl.SliceLayout(1, layout)) // (TILE[1] * TILE[2])
    return window_start(axis[0] + gl.minimum(t, axis[1] - 1), axis, KT)


@gluon.jit
def _cell_bytes(cell, plane, corner, axes, strides, WIDTH: gl.constexpr):
    """(keys,) byte offsets of a plane's cells, `plane` planes on, from the first cell of the union's first plane."""
    cells = key_offsets(
        (cell // WIDTH).to(gl.int32), (cell % WIDTH).to(gl.int32),
        axes[1][2] - 1 - corner[0], axes[2][2] - 1 - corner[1], strides, False,
    )  # fmt: skip
    return 2 * (cells + plane * tl.cast(strides[1], tl.int32))


@gluon.jit
def _block_offsets(block, corner, axes, strides, layout: gl.constexpr, BLOCK_KV: gl.constexpr, WIDTH: gl.constexpr):
    """(keys,) byte offsets of the cells of a block from the first cell of their plane of the union."""
    cell = (block * BLOCK_KV + gl.arange(0, BLOCK_KV, layout)).to(gl.uint32)
    return _cell_bytes(cell, 0, corner, axes, strides, WIDTH)


@gluon.jit
def _rest_offsets(
    behind, planes, corner, axes, strides, layout: gl.constexpr,
    BLOCK_KV: gl.constexpr, WIDTH: gl.constexpr, BLOCKS: gl.constexpr, REST: gl.constexpr,
):  # fmt: skip
    """(keys,) byte offsets of the cells of the rest from the plane `behind` planes before the tile's first."""
    n = gl.arange(0, BLOCK_KV, layout).to(gl.uint32)
    plane = behind + gl.minimum((n // REST).to(gl.int32), planes - 1)
    return _cell_bytes(BLOCKS * BLOCK_KV + n % REST, plane, corner, axes, strides, WIDTH)


@gluon.jit
def _write_mask(
    mask, block, place, first_t, corner, axes, layout: gl.constexpr, KERNEL: gl.constexpr, TILE: gl.constexpr,
    BLOCKS: gl.constexpr, REST: gl.constexpr, IS_REST: gl.constexpr,
):  # fmt: skip
    """(CHANNELS, keys): large and negative where the queries of the channel's row, column or plane do not see the key.

    Planes only hide keys of the rest; in whole blocks `probabilities` hides them.
    """
    CHANNELS: gl.constexpr = mask.shape[0]
    BLOCK_KV: gl.constexpr = mask.shape[1]
    WIDTH: gl.constexpr = TILE[2] + KERNEL[2] - 1
    keys: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, layout))
    group = gl.arange(0, BLOCK_KV // 8, keys)[None, :, None] * 8
    j = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(1, layout)))[None, None, :]
    c_h = gl.arange(0, CHANNELS, gl.SliceLayout(1, gl.SliceLayout(2, layout)))[:, None, None]
    c_w = c_h - TILE[1]
    c_t = c_w - TILE[2]
    start_h = window_start(axes[1][0] + gl.minimum(place[1] + c_h, axes[1][1] - 1), axes[1], KERNEL[1]) - corner[0]
    start_w = window_start(axes[2][0] + gl.minimum(place[2] + c_w, axes[2][1] - 1), axes[2], KERNEL[2]) - corner[1]
    if IS_REST:
        start_t = window_start(axes[0][0] + gl.minimum(place[0] + c_t, axes[0][1] - 1), axes[0], KERNEL[0]) - first_t
        n = (group + j).to(gl.uint32)
        cell = BLOCKS * BLOCK_KV + n % REST
        key = gl.where(c_w < 0, cell // WIDTH, gl.where(c_t < 0, cell % WIDTH, n // REST)).to(gl.int32)
        key -= gl.where(c_w < 0, start_h, gl.where(c_t < 0, start_w, start_t))
        is_channel = c_t < TILE[0]
    else:
        first = (block * BLOCK_KV + group).to(gl.uint32)  # of 8 keys, which one row's end divides at most
        key_w = (first % WIDTH).to(gl.int32)
        key_h = (first // WIDTH).to(gl.int32)
        over = key_w + j >= WIDTH
        key = gl.where(c_w < 0, key_h - start_h, key_w - start_w + j)
        key += gl.where(over, gl.where(c_w < 0, 1, -WIDTH), 0)
        is_channel = (c_t < 0) & (j < 8)
    size = gl.where(c_w < 0, KERNEL[1], gl.where(c_t < 0, KERNEL[2], KERNEL[0]))
    hidden = (key.to(gl.uint32) >= size.to(gl.uint32)) & is_channel
    x = gl.reshape(gl.where(hidden, HIDDEN, 0.0).to(mask.dtype), (CHANNELS, BLOCK_KV))
    rows: gl.constexpr = gl.BlockedLayout([1, 8], [256 // BLOCK_KV, BLOCK_KV // 8], [4, 1], [1, 0])
    mask.store(gl.convert_layout(x, rows, assert_trivial=True))
    fence_async_shared()


@gluon.jit
def _prepare_rest(
    k_table, v_table, masks, place, until, corner, axes, k_strides, v_strides,
    cells_layout: gl.constexpr, mask_layout: gl.constexpr, KERNEL: gl.constexpr, TILE: gl.constexpr,
    BLOCKS: gl.constexpr, REST: gl.constexpr, SAME_STRIDES: gl.constexpr,
):  # fmt: skip
    """Mask and offsets of the rest of the tile at `place`; offsets from plane until - QT - KT."""
    BLOCK_KV: gl.constexpr = masks.shape[2]
    WIDTH: gl.constexpr = TILE[2] + KERNEL[2] - 1
    first, planes = union(place[0], axes[0], TILE[0], KERNEL[0])
    behind = first - (until - TILE[0] - KERNEL[0])
    k_table.index(BLOCKS).store(
        _rest_offsets(behind, planes, corner, axes, k_strides, cells_layout, BLOCK_KV, WIDTH, BLOCKS, REST)
    )  # fmt: skip
    if not SAME_STRIDES:
        v_table.index(BLOCKS).store(
            _rest_offsets(behind, planes, corner, axes, v_strides, cells_layout, BLOCK_KV, WIDTH, BLOCKS, REST)
        )  # fmt: skip
    _write_mask(
        masks.index(BLOCKS), BLOCKS, place, first, corner, axes, mask_layout, KERNEL, TILE, BLOCKS, REST, True
    )  # fmt: skip


@gluon.jit
def _load_keys(slot, plane, cells):
    """Start to copy a block of K or V. plane (1, head_dim): where the byte offsets `cells` (keys,) count from."""
    x = plane.to(gl.pointer_type(gl.uint8), bitcast=True) + cells[:, None].to(gl.uint32).to(gl.int64)
    x = x.to(plane.dtype, bitcast=True)
    _copy(slot, gl.max_contiguous(gl.multiple_of(x, [1, 16]), [1, 8]))


@gluon.jit
def _load_queries(slot, Q, b, head, place, axes, strides, turn, layout: gl.constexpr, TILE: gl.constexpr):
    """Start to copy the rows that turn to the tile at `place`."""
    HALF: gl.constexpr = slot.shape[0] // 2
    d = gl.arange(0, slot.shape[1], gl.SliceLayout(0, layout))[None, :]
    for half in gl.static_range(2):
        if turn & (1 + half) > 0:
            t, h, w = _queries(HALF * half + gl.arange(0, HALF, gl.SliceLayout(1, layout)), place, TILE)
            t = gl.minimum(t, axes[0][1] - 1)
            h = gl.minimum(h, axes[1][1] - 1)
            w = gl.minimum(w, axes[2][1] - 1)
            x = (Q + cell_offsets(b, head, t, h, w, strides))[:, None] + d
            _copy(slot.slice(HALF * half, HALF), gl.max_contiguous(gl.multiple_of(x, [1, 16]), [1, 8]))


@gluon.jit
def _step(
    k_slot, v_slot, k_next, v_next, one_hot, masks, k_table, v_table, k_plane, v_plane, k_stride, v_stride,
    q, acc, l, start_t, shift, steps, block, plane, next_plane, has_rest,
    KT: gl.constexpr, BLOCKS: gl.constexpr, REACH: gl.constexpr, SAME_STRIDES: gl.constexpr,
):  # fmt: skip
    """One block of keys, and the loads of the next one.

    Returns acc, l, and of what is next: how many steps are left of the run, block, plane, and where K and V lie.
    """
    QUERIES: gl.constexpr = q.shape[0]
    BLOCK_KV: gl.constexpr = k_slot.shape[0]
    scores_layout: gl.constexpr = q.type.layout.parent
    cells_layout: gl.constexpr = gl.SliceLayout(1, k_plane.type.layout)
    async_copy.wait_group(0)  # and a barrier
    fence_async_shared()  # wgmma reads K and V by another way than they were written
    mask = masks.index(block)
    seen = ((plane >= start_t) & (plane < start_t + KT)) | (block == BLOCKS)
    steps -= 1
    block += 1
    if (steps == 0) | (block == BLOCKS):
        is_rest = has_rest & (steps == 1)
        further = gl.where(steps == 0, next_plane - plane, gl.where(is_rest, 1 - REACH, 1))
        block = gl.where(is_rest, BLOCKS, 0)
        plane += further
        k_plane += tl.cast(further, tl.int64) * k_stride
        v_plane += tl.cast(further, tl.int64) * v_stride
    cells = k_table.index(block).load(cells_layout)
    _load_keys(k_next, k_plane, cells)
    if not SAME_STRIDES:
        cells = v_table.index(block).load(cells_layout)
    _load_keys(v_next, v_plane, cells)
    async_copy.commit_group()
    zeros = gl.zeros((QUERIES, BLOCK_KV), gl.float32, scores_layout)
    s = warpgroup_mma(one_hot, mask, zeros, use_acc=False, is_async=True)
    s = warpgroup_mma(q, k_slot.permute((1, 0)), s, is_async=True)
    s = warpgroup_mma_wait(0, deps=[s])
    p = probabilities(s, shift, seen, QUERIES * BLOCK_KV // 128)
    l += gl.sum(gl.reshape(p, (QUERIES, BLOCK_KV // 8, 8)), 1)
    p = gl.convert_layout(p.to(k_slot.dtype), gl.DotOperandLayout(0, acc.type.layout, 2))
    acc = warpgroup_mma(p, v_slot, acc, is_async=True)
    return warpgroup_mma_wait(0, deps=[acc]), l, steps, block, plane, k_plane, v_plane


@gluon.jit
def _finish(
    OUT, FLAGS, acc, l, turn, pending, b, head, place, axes, strides, flag_steps,
    TILE: gl.constexpr, CHECKED: gl.constexpr,
):  # fmt: skip
    """Write the rows that turn from the tile at `place`, and with its late half its flag.

    pending: whether the early half is to be flagged; returned for the next call.
    """
    layout: gl.constexpr = acc.type.layout
    QUERIES: gl.constexpr = acc.shape[0]
    sums = gl.convert_layout(gl.sum(l, 1), gl.SliceLayout(1, layout))
    written = _turns(turn, QUERIES, layout)
    if CHECKED:
        good = (sums > 2.0**-64) & (sums < 2.0**64)  # also false for NaN
        pending |= gl.max(gl.where(good | (written == 0), 0, 1), 0)
        if turn >= 2:
            flag = place[0] // TILE[0] * flag_steps[0] + place[1] // TILE[1] * flag_steps[1]
            flag += place[2] // TILE[2] * flag_steps[2]
            gl.store(FLAGS + tl.cast(gl.program_id(2), tl.int64) * flag_steps[3] + flag, pending)
            pending = 0
    t, h, w = _queries(gl.arange(0, QUERIES, gl.SliceLayout(1, layout)), place, TILE)
    exists = written & (t < axes[0][1]) & (h < axes[1][1]) & (w < axes[2][1])
    d = gl.arange(0, acc.shape[1], gl.SliceLayout(0, layout))[None, :]
    out = (OUT + cell_offsets(b, head, t, h, w, strides))[:, None] + d
    gl.store(out, (acc * (1.0 / sums)[:, None]).to(OUT.dtype.element_ty), mask=exists[:, None])
    return pending


@gluon.jit(do_not_specialize=[*GEOMETRY, "heads", *FLAG_STEPS, "tiles"], repr=_name)
def tile_hopper_kernel(
    Q, K, V, OUT, FLAGS,
    t_offset, t_queries, t_keys, t_lowest, t_highest, h_offset, h_queries, h_keys, h_lowest, h_highest,
    w_offset, w_queries, w_keys, w_lowest, w_highest,
    heads, flag_t, flag_h, flag_w, flag_head, tiles, shift, q_strides, k_strides, v_strides, out_strides,
    KT: gl.constexpr, KH: gl.constexpr, KW: gl.constexpr, HEAD_DIM: gl.constexpr,
    QT: gl.constexpr, QH: gl.constexpr, QW: gl.constexpr, BLOCK_KV: gl.constexpr, CHANNELS: gl.constexpr,
    SAME_STRIDES: gl.constexpr, CHECKED: gl.constexpr, PAD_REST: gl.constexpr, ABREAST: gl.constexpr,
):  # fmt: skip
    """Grid (tiles along W, segments along T * tiles along H * ABREAST, batch * heads), four warps, 64 queries.

    A program has `tiles` tiles, ABREAST * QT queries apart; hopper.py chooses both. Other arguments as for tile_kernel.
    WIDTH at least 8, the rest of a tile at most one block, offsets within a union of less than 2**31 elements, every
    cell at a multiple of 16 bytes.
    """
    TILE: gl.constexpr = (QT, QH, QW)
    KERNEL: gl.constexpr = (KT, KH, KW)
    QUERIES: gl.constexpr = QT * QH * QW
    WIDTH: gl.constexpr = QW + KW - 1
    CELLS: gl.constexpr = (QH + KH - 1) * WIDTH
    BLOCKS: gl.constexpr = CELLS // BLOCK_KV + PAD_REST
    HAS_REST: gl.constexpr = CELLS > BLOCKS * BLOCK_KV
    REST: gl.constexpr = CELLS - BLOCKS * BLOCK_KV if HAS_REST else 1
    AHEAD: gl.constexpr = ABREAST * QT
    dtype: gl.constexpr = Q.dtype.element_ty
    scores_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_KV, 16])
    out_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    mask_layout: gl.constexpr = gl.BlockedLayout([1, 1, 8], [256 // BLOCK_KV, BLOCK_KV // 8, 1], [4, 1, 1], [2, 1, 0])
    copy_layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // HEAD_DIM, HEAD_DIM // 8], [4, 1], [1, 0])
    cells_layout: gl.constexpr = gl.SliceLayout(1, copy_layout)
    slot_shared: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_KV, HEAD_DIM], dtype)
    mask_shared: gl.constexpr = gl.NVMMASharedLayout.get_default_for([CHANNELS, BLOCK_KV], dtype)
    hot_shared: gl.constexpr = gl.NVMMASharedLayout.get_default_for([QUERIES, CHANNELS], dtype)
    cells_shared: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    k_slots = gl.allocate_shared_memory(dtype, [2, BLOCK_KV, HEAD_DIM], slot_shared)
    v_slots = gl.allocate_shared_memory(dtype, [2, BLOCK_KV, HEAD_DIM], slot_shared)
    q_slot = gl.allocate_shared_memory(dtype, [QUERIES, HEAD_DIM], slot_shared)
    # Of each block, the rest last.
    masks = gl.allocate_shared_memory(dtype, [BLOCKS + HAS_REST, CHANNELS, BLOCK_KV], mask_shared)
    k_table = gl.allocate_shared_memory(gl.int32, [BLOCKS + HAS_REST, BLOCK_KV], cells_shared)
    v_table = k_table
    if not SAME_STRIDES:
        v_table = gl.allocate_shared_memory(gl.int32, [BLOCKS + HAS_REST, BLOCK_KV], cells_shared)

    axes = (
        (t_offset, t_queries, t_keys, t_lowest, t_highest),
        (h_offset, h_queries, h_keys, h_lowest, h_highest),
        (w_offset, w_queries, w_keys, w_lowest, w_highest),
    )
    flag_steps = (flag_t, flag_h, flag_w, flag_head)
    rows_of_tiles = tl.cdiv(h_queries, QH)
    b = tl.cast(gl.program_id(2) // heads, tl.int64)
    head = tl.cast(gl.program_id(2) % heads, tl.int64)
    t0 = (gl.program_id(1) % ABREAST) * QT + gl.program_id(1) // (rows_of_tiles * ABREAST) * tiles * AHEAD
    h0 = (gl.program_id(1) // ABREAST % rows_of_tiles) * QH
    w0 = gl.program_id(0) * QW
    stop = gl.minimum(t0 + tiles * AHEAD, t_queries)
    if t0 >= stop:
        return
    corner = (union(h0, axes[1], QH, KH)[0], union(w0, axes[2], QW, KW)[0])
    v_steps = k_strides if SAME_STRIDES else v_strides  # k's offsets then serve v
    for n in range(BLOCKS):
        k_table.index(n).store(_block_offsets(n, corner, axes, k_strides, cells_layout, BLOCK_KV, WIDTH))
        if not SAME_STRIDES:
            v_table.index(n).store(_block_offsets(n, corner, axes, v_steps, cells_layout, BLOCK_KV, WIDTH))
        _write_mask(masks.index(n), n, (t0, h0, w0), 0, corner, axes, mask_layout, KERNEL, TILE, BLOCKS, REST, False)
    hot_layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 * 8 // CHANNELS, CHANNELS // 8], [4, 1], [1, 0])
    i = gl.arange(0, QUERIES, gl.SliceLayout(1, hot_layout))[:, None]
    c = gl.arange(0, CHANNELS, gl.SliceLayout(0, hot_layout))[None, :]
    is_hot = (c == (i // QW) % QH) | (c == QH + i % QW) | (c == QH + QW + i // (QH * QW))
    one_hot = gl.allocate_shared_memory(dtype, [QUERIES, CHANNELS], hot_shared)
    one_hot.store(gl.where(is_hot, 1.0, 0.0).to(dtype))
    fence_async_shared()

    # A program's steps come in runs. A run is the planes of a tile while all rows hold its queries, and its rest; or,
    # before that, the planes (`lead`) during which the late half of the rows still holds the last tile's queries.
    first, until, end = _plan(t0, AHEAD, stop, axes[0], QT, KT)
    plane = first
    block = first * 0
    lead = first * 0
    slot = first * 0
    pending = first * 0
    d = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, copy_layout))[None, :]
    k_plane = (K + cell_offsets(b, head, plane, corner[0], corner[1], k_strides)) + d
    v_plane = (V + cell_offsets(b, head, plane, corner[0], corner[1], v_steps)) + d
    _load_keys(k_slots.index(0), k_plane, k_table.index(0).load(cells_layout))
    _load_keys(v_slots.index(0), v_plane, v_table.index(0).load(cells_layout))
    _load_queries(q_slot, Q, b, head, (t0, h0, w0), axes, q_strides, 3, copy_layout, TILE)
    async_copy.commit_group()
    async_copy.wait_group(0)

    l = gl.sum(gl.reshape(gl.zeros((QUERIES, BLOCK_KV), gl.float32, scores_layout), (QUERIES, BLOCK_KV // 8, 8)), 1)
    l_layout: gl.constexpr = l.type.layout
    acc = gl.zeros((QUERIES, HEAD_DIM), gl.float32, out_layout)
    start_t = _first_planes(t0, axes[0], scores_layout, KT, TILE)
    while t0 < stop:
        steps = lead * BLOCKS
        next_plane = first + lead
        turn = 2  # which rows do after this run, and to which tile
        next_t0 = t0
        if lead == 0:
            steps = (until - plane) * BLOCKS + HAS_REST
            following = window_start(t_offset + t0 + AHEAD, axes[0], KT)
            next_plane = gl.where(t0 + AHEAD < stop, following, first)  # after the last tile: loaded in vain
            turn = gl.where(until < end, 1, 3)
            next_t0 = t0 + AHEAD
            if HAS_REST:
                _prepare_rest(
                    k_table, v_table, masks, (t0, h0, w0), until, corner, axes, k_strides, v_steps, cells_layout,
                    mask_layout, KERNEL, TILE, BLOCKS, REST, SAME_STRIDES,
                )  # fmt: skip
        has_rest = HAS_REST & (lead == 0)
        q = q_slot.load(gl.DotOperandLayout(0, scores_layout, 2))
        _load_queries(q_slot, Q, b, head, (next_t0, h0, w0), axes, q_strides, turn, copy_layout, TILE)
        while steps > 0:
            acc, l, steps, block, plane, k_plane, v_plane = _step(
                k_slots.index(slot), v_slots.index(slot), k_slots.index(1 - slot), v_slots.index(1 - slot),
                one_hot, masks, k_table, v_table, k_plane, v_plane, k_strides[1], v_steps[1],
                q, acc, l, start_t, shift, steps, block, plane, next_plane, has_rest, KT, BLOCKS, QT + KT, SAME_STRIDES,
            )  # fmt: skip
            slot = 1 - slot
        if steps < 0:
            # Never so, but q must live past the loop. Otherwise ptxas 12.8 to 13.0 gives the registers of a
            # loop-invariant wgmma operand A to the probabilities and the scores are wrong (test_na_compile.py looks).
            q_slot.store(q)
        if lead > 0:
            lead = 0
        else:
            lead = end - until
            t0 += AHEAD
            first, until, end = _plan(t0, AHEAD, stop, axes[0], QT, KT)
        pending = _finish(
            OUT, FLAGS, acc, l, turn, pending, b, head, (t0 - AHEAD, h0, w0), axes, out_strides, flag_steps,
            TILE, CHECKED,
        )  # fmt: skip
        if t0 < stop:
            turned = _turns(turn, QUERIES, scores_layout)
            start_t = gl.where(turned, _first_planes(t0, axes[0], scores_layout, KT, TILE), start_t)
            l = gl.where(_turns(turn, QUERIES, l_layout)[:, None], 0.0, l)
            acc = gl.where(_turns(turn, QUERIES, out_layout)[:, None], 0.0, acc)
    async_copy.wait_group(0)
