"""Exact neighborhood attention out of torch's scaled_dot_product_attention, for any device and dtype.

The query grid is cut into tiles. A tile attends to the union of its windows under an additive mask that depends only
on where its windows lie relative to each other, and tiles of one such geometry go through SDPA together, gathered by
strided views. Inside the grid all tiles share one geometry; the border adds a few per axis.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from layers.neighborhood_attention.geometry import Axis, check_inputs, window_start

# A tile of queries costs pairs + gather * keys: copying one key and its value costs as much as this many scores.
# Estimated from 15 GB/s and 50 GFLOP/s of one core, and 3 TB/s and 200 TFLOP/s of an H200.
_GATHER_COST = {"cpu": 16, "accelerator": 128}
_MASK_BYTES = {"cpu": 2**20, "accelerator": 2**25}
_KV_BYTES = {"cpu": 2**23, "accelerator": 2**28}
_MASK_ALIGN = 16  # the memory-efficient kernel reads mask rows in 16-element steps and would copy an unaligned mask


@dataclass(frozen=True)
class _Run:
    """`count` consecutive tiles of one geometry on one axis; queries and keys both advance by the tile's length.

    `q_first` and `kv_first` are positions in the q and k tensors.
    """

    q_first: int
    kv_first: int
    count: int


@dataclass(frozen=True)
class _Geometry:
    """Tiles of `q_len` queries whose union of windows has `kv_len` keys; `starts` are window starts in the union."""

    q_len: int
    kv_len: int
    starts: tuple[int, ...]


def neighborhood_attention_sdpa(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    kernel_size: Sequence[int],
    *,
    q_start: Sequence[int] = (0, 0, 0),
    kv_start: Sequence[int] = (0, 0, 0),
    grid: Sequence[int] | None = None,
    mask_bytes: int | None = None,
    kv_bytes: int | None = None,
) -> torch.Tensor:
    """The function of neighborhood_attention_reference, tiled: same arguments, same result within rounding.

    q (B, Tq, Hq, Wq, heads, head_dim) pre-scaled; k, v (B, Tk, Hk, Wk, heads, head_dim); any floating dtype, strides.
    mask_bytes limits the mask, which is built for one geometry at a time, and kv_bytes the keys and values gathered for
    one SDPA call (defaults: 1 MiB and 8 MiB on a CPU, 32 and 256 MiB elsewhere). Nothing synchronises with the device.
    A window that alone exceeds kv_bytes is walked in pieces, query by query: slow, exact and within the budget.
    Returns q's shape and dtype, contiguous. Raises ValueError as check_inputs does.
    """
    axes = check_inputs(q, k, v, kernel_size, q_start=q_start, kv_start=kv_start, grid=grid)
    kind = "cpu" if q.device.type == "cpu" else "accelerator"
    mask_bytes = _MASK_BYTES[kind] if mask_bytes is None else mask_bytes
    kv_bytes = _KV_BYTES[kind] if kv_bytes is None else kv_bytes
    key_bytes = 2 * q.shape[-1] * q.element_size()
    if math.prod(axis.kernel for axis in axes) * key_bytes > kv_bytes:
        return _attend_in_pieces(q, k, v, axes, kv_bytes)
    tile = _choose_tile(axes, mask_bytes // q.element_size(), kv_bytes // key_bytes, _GATHER_COST[kind])

    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    per_axis = [_geometries(axis, length) for axis, length in zip(axes, tile, strict=True)]
    for geometry in itertools.product(*per_axis):
        mask = _mask(geometry, axes, [per_axis[i][g][0] for i, g in enumerate(geometry)], q)
        keys = math.prod(g.kv_len for g in geometry)
        heads = min(q.shape[4], max(1, kv_bytes // (keys * key_bytes)))
        max_tiles = max(1, kv_bytes // (keys * key_bytes * heads))
        for runs in itertools.product(*(per_axis[i][g] for i, g in enumerate(geometry))):
            for part in _split(geometry, runs, max_tiles):
                for b, head in itertools.product(range(q.shape[0]), range(0, q.shape[4], heads)):
                    chosen = slice(head, head + heads)
                    _attend(tuple(x[b, :, :, :, chosen] for x in (q, k, v, out)), geometry, part, mask)
    return out


def _choose_tile(axes: Sequence[Axis], max_pairs: int, max_keys: int, gather_cost: int) -> tuple[int, int, int]:
    """The cheapest tile whose mask and keys fit; a single query needs no mask, so one always fits."""

    def cost(tile: tuple[int, ...]) -> float:
        keys = math.prod(min(n + axis.kernel - 1, axis.length) for n, axis in zip(tile, axes, strict=True))
        queries = math.prod(tile)
        row = -(-keys // _MASK_ALIGN) * _MASK_ALIGN
        if queries > 1 and (queries * row > max_pairs or keys > max_keys):
            return math.inf
        return keys * (1 + gather_cost / queries)

    lengths = [sorted({axis.q_len, *(2**i for i in range(axis.q_len.bit_length()))}) for axis in axes]
    best = min(itertools.product(*lengths), key=cost)
    return best[0], best[1], best[2]


def _geometries(axis: Axis, tile: int) -> dict[_Geometry, list[_Run]]:
    """The tiles of one axis, grouped by geometry and, within one, into runs of regular stride."""
    found: dict[_Geometry, list[_Run]] = {}
    for first in range(0, axis.q_len, tile):
        count = min(tile, axis.q_len - first)
        begin, end = axis.key_range(axis.q_start + first, axis.q_start + first + count - 1)
        positions = range(axis.q_start + first, axis.q_start + first + count)
        starts = tuple(window_start(p, axis.kernel, axis.length) - begin for p in positions)
        runs = found.setdefault(_Geometry(count, end - begin, starts), [])
        kv_first = begin - axis.kv_start
        last = runs[-1] if runs else None
        if last and (first, kv_first) == (last.q_first + last.count * tile, last.kv_first + last.count * tile):
            runs[-1] = _Run(last.q_first, last.kv_first, last.count + 1)
        else:
            runs.append(_Run(first, kv_first, 1))
    return found


def _mask(
    geometry: tuple[_Geometry, ...], axes: Sequence[Axis], first_runs: Sequence[_Run], q: torch.Tensor
) -> torch.Tensor | None:
    """(1, 1, Nq, Nk): 0 where the query sees the key and -inf elsewhere; None where every query sees every key.

    Window starts are computed again on the device: copying them there would wait for it.
    """
    if not any(any(g.starts) for g in geometry):
        return None
    queries = math.prod(g.q_len for g in geometry)
    keys = math.prod(g.kv_len for g in geometry)
    row = -(-keys // _MASK_ALIGN) * _MASK_ALIGN
    mask = torch.zeros((queries, row), dtype=q.dtype, device=q.device)[:, :keys]
    grid = mask.unflatten(1, [g.kv_len for g in geometry]).unflatten(0, [g.q_len for g in geometry])
    for i, (g, axis, run) in enumerate(zip(geometry, axes, first_runs, strict=True)):
        if not any(g.starts):
            continue
        position = torch.arange(g.q_len, device=q.device) + (axis.q_start + run.q_first)
        start = (position - axis.kernel // 2).clamp(0, axis.length - axis.kernel) - (axis.kv_start + run.kv_first)
        key = torch.arange(g.kv_len, device=q.device)
        hidden = (key < start[:, None]) | (key >= start[:, None] + axis.kernel)
        shape = [1] * 6
        shape[i], shape[3 + i] = g.q_len, g.kv_len
        grid.masked_fill_(hidden.view(shape), -math.inf)
    return mask[None, None]


def _split(geometry: tuple[_Geometry, ...], runs: tuple[_Run, ...], max_tiles: int) -> Iterator[tuple[_Run, ...]]:
    """Blocks of at most max_tiles tiles."""
    counts = [1, 1, 1]
    for i in (2, 1, 0):
        counts[i] = min(runs[i].count, max(1, max_tiles // math.prod(counts)))
    for index in itertools.product(*(range(0, run.count, n) for run, n in zip(runs, counts, strict=True))):
        yield tuple(
            _Run(run.q_first + i * g.q_len, run.kv_first + i * g.q_len, min(n, run.count - i))
            for g, run, i, n in zip(geometry, runs, index, counts, strict=True)
        )


def _attend(
    tensors: tuple[torch.Tensor, ...],
    geometry: tuple[_Geometry, ...],
    runs: tuple[_Run, ...],
    mask: torch.Tensor | None,
) -> None:
    """One SDPA call over a block of tiles of one geometry; tensors are q, k, v, out: (T, H, W, heads, head_dim)."""
    q, k, v, out = tensors
    tiles = math.prod(run.count for run in runs)

    def gather(x: torch.Tensor, firsts: list[int], lengths: list[int]) -> torch.Tensor:
        for i, (first, length) in enumerate(zip(firsts, lengths, strict=True)):
            step, count = geometry[i].q_len, runs[i].count
            x = x.narrow(i, first, (count - 1) * step + length).unfold(i, length, step)
        # (nT, nH, nW, heads, head_dim, lT, lH, lW) -> (tiles, heads, cells, head_dim)
        return x.permute(0, 1, 2, 5, 6, 7, 3, 4).reshape(tiles, -1, *q.shape[3:]).transpose(1, 2)

    q_firsts, q_lens = [run.q_first for run in runs], [g.q_len for g in geometry]
    kv_firsts, kv_lens = [run.kv_first for run in runs], [g.kv_len for g in geometry]
    result = F.scaled_dot_product_attention(
        gather(q, q_firsts, q_lens), gather(k, kv_firsts, kv_lens), gather(v, kv_firsts, kv_lens), mask, scale=1.0
    )
    target = out
    for i, (first, length) in enumerate(zip(q_firsts, q_lens, strict=True)):
        target = target.narrow(i, first, runs[i].count * length)
    for i in (2, 1, 0):
        target = target.unflatten(i, (runs[i].count, q_lens[i]))
    counts = [run.count for run in runs]
    target.copy_(result.transpose(1, 2).reshape(*counts, *q_lens, *q.shape[3:]).permute(0, 3, 1, 4, 2, 5, 6, 7))


def _attend_in_pieces(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, axes: Sequence[Axis], kv_bytes: int
) -> torch.Tensor:
    """Each query alone, over pieces of its window merged by their running maximum, in fp32 (fp64 for fp64)."""
    exact = torch.promote_types(q.dtype, torch.float32)
    limit = max(1, kv_bytes // (2 * q.shape[5] * torch.finfo(exact).bits // 8))
    piece = [1, 1, 1]
    for i in (2, 1, 0):
        piece[i] = min(axes[i].kernel, max(1, limit // math.prod(piece)))
    offsets = [range(0, axis.kernel, n) for axis, n in zip(axes, piece, strict=True)]
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    cells = itertools.product(range(q.shape[0]), *(range(axis.q_len) for axis in axes), range(q.shape[4]))
    for b, t, h, w, head in cells:
        starts = [
            window_start(axis.q_start + i, axis.kernel, axis.length) - axis.kv_start
            for axis, i in zip(axes, (t, h, w), strict=True)
        ]
        query = q[b, t, h, w, head].to(exact)
        top = torch.full((), -math.inf, dtype=exact, device=q.device)
        total = torch.zeros((), dtype=exact, device=q.device)
        acc = torch.zeros_like(query)
        for offset in itertools.product(*offsets):
            index = tuple(
                slice(start + o, start + min(o + n, axis.kernel))
                for start, o, n, axis in zip(starts, offset, piece, axes, strict=True)
            )
            scores = k[b, ..., head, :][index].flatten(0, 2).to(exact) @ query
            new_top = torch.maximum(top, scores.max())
            weights = (scores - new_top).exp()
            shrink = (top - new_top).exp()
            total = total * shrink + weights.sum()
            acc = acc * shrink + weights @ v[b, ..., head, :][index].flatten(0, 2).to(exact)
            top = new_top
        out[b, t, h, w, head] = acc / total
    return out
