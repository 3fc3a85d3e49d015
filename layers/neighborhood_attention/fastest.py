"""--decoder_attention fastest: time the usable backends on the run's own grids and keep the best of each kernel."""

import logging
import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from layers.neighborhood_attention.backend import Backend, Size
from layers.neighborhood_attention.routing import RoutedAttention
from layers.neighborhood_attention.select import Everywhere, Selection

logger = logging.getLogger(__name__)

_MAX_CELLS = 2**22  # cells times heads that are timed: half a GiB a tensor at head_dim 64 in bf16
_REPEATS = 5


@dataclass(frozen=True)
class Grid:
    """`blocks` calls of one stage: a whole (T, H, W) grid of `heads` heads."""

    kernel_size: Size
    shape: Size
    heads: int
    blocks: int


def choose_fastest(
    selection: Selection, grids: Sequence[Grid], *, everywhere: Everywhere = lambda value: [value]
) -> dict[str, dict[str, float]]:
    """Time every usable backend on every grid and prefer the best of each kernel size; the slowest rank counts.

    A grid too large to time whole is cut (frames first) and its time scaled. Returns, and logs, milliseconds of all
    blocks by kernel size and backend; empty where there is nothing to choose from. Every rank calls it.
    """
    attention = selection.attention
    if len(attention.backends) == 1:
        return {}
    own = [[_milliseconds(backend, grid, selection) for backend in attention.backends] for grid in grids]
    ranks = everywhere(own)
    table: dict[str, dict[str, float]] = {}
    for kernel in dict.fromkeys(grid.kernel_size for grid in grids):
        mine = [i for i, grid in enumerate(grids) if grid.kernel_size == kernel]
        totals = {
            backend.name: sum(max(times[i][b] for times in ranks) for i in mine)
            for b, backend in enumerate(attention.backends)
        }
        best = min(attention.backends, key=lambda backend: totals[backend.name])
        attention.prefer(kernel, best)
        table[str(kernel)] = selection.timings[str(kernel)] = totals
        shown = ", ".join(f"{name} {ms:.3f} ms" for name, ms in totals.items())
        logger.info("decoder attention: using %s for %s (%s, a video's blocks)", best.name, kernel, shown)
    return table


def _milliseconds(backend: Backend, grid: Grid, selection: Selection) -> float:
    target = selection.target
    shape = _cut(grid)
    generator = torch.Generator(target.device).manual_seed(0)
    size = (1, *shape, 3, grid.heads, target.head_dim)
    qkv = torch.randn(size, generator=generator, device=target.device, dtype=target.dtype)
    qkv[..., 0, :, :] *= target.head_dim**-0.5
    q, k, v = qkv.unbind(4)
    attention = RoutedAttention([backend])  # what it cannot take costs what SDPA costs
    times = []
    for _ in range(_REPEATS):
        _synchronize(target.device)
        start = time.perf_counter()
        attention(q, k, v, grid.kernel_size)
        _synchronize(target.device)
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times[1:]) * grid.blocks * math.prod(grid.shape) / math.prod(shape)


def _cut(grid: Grid) -> Size:
    shape = list(grid.shape)
    for axis in (0, 1, 2):
        others = grid.heads * math.prod(shape) // shape[axis]
        shape[axis] = min(shape[axis], max(grid.kernel_size[axis], _MAX_CELLS // others))
    return shape[0], shape[1], shape[2]


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
