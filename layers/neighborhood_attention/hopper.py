"""Whether and how kernel_tile_hopper.py takes a call: which programs walk over which tiles."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from layers.neighborhood_attention import configs
from layers.neighborhood_attention.configs import TileConfig
from layers.neighborhood_attention.geometry import Axis

_PROGRAMS = 4  # on a multiprocessor, at 128 registers
_BLOCKS = 32  # of keys in a plane: each has a mask of 2 KiB in shared memory
_X = TypeVar("_X")


@dataclass(frozen=True)
class Walks:
    """Programs of a launch. order: the axes as the kernel takes them, the one walked along first.

    tiles: how many a program takes, every `abreast`-th of its line along that axis; pads_rest: whether cells left over
    after a plane's whole blocks of keys take a padded block, rather than one step of a tile for all its planes.
    """

    order: tuple[int, int, int]
    grid: tuple[int, int, int]
    tiles: int
    abreast: int
    pads_rest: bool

    def ordered(self, values: Sequence[_X]) -> list[_X]:
        """Values of T, H and W in the kernel's order."""
        return [values[axis] for axis in self.order]

    def strides(self, strides: Sequence[int]) -> tuple[int, ...]:
        """Strides of (B, T, H, W, heads) in the kernel's order."""
        return (strides[0], *self.ordered(strides[1:4]), strides[4])


def plan_walks(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    axes: Sequence[Axis],
    kernel: tuple[int, int, int],
    config: TileConfig,
) -> Walks | None:
    """None where the kernel does not take the call.

    It takes bf16 on sm90; unions 8 columns wide or more, of up to 32 blocks a plane; grids of less than 2**16 in two
    dimensions; k, v whose offsets within a union stay below 2**31; and cells that lie at multiples of 16 bytes.
    """
    if not config.walk or q.dtype != torch.bfloat16:
        return None
    if q.device.type == "cuda" and configs.arch_of(q.device) != "sm90":
        return None
    if any(step % 8 for x in (q, k, v) for step in x.stride()[:5]) or any(x.data_ptr() % 16 for x in (q, k, v)):
        return None
    order = configs.WALK_ORDERS[config.walk]
    (length, *across), (planes, *window) = ([x[axis] for axis in order] for x in (config.tile, kernel))
    rows, columns = (n + size - 1 for n, size in zip(across, window, strict=True))
    if columns < 8 or rows * columns > _BLOCKS * config.block_kv:
        return None
    for x in (k, v):
        # The rest counts from up to `length` planes before the union; padding a block adds rows.
        reach = (planes + 2 * length, rows + -(-config.block_kv // columns), columns)
        steps = [x.stride(1 + axis) for axis in order]
        if sum(n * step for n, step in zip(reach, steps, strict=True)) + x.shape[5] >= 2**31:
            return None

    lines = [-(-axes[axis].q_len // config.tile[axis]) for axis in order]
    batch_heads = q.shape[0] * q.shape[4]
    abreast = -(-(planes + 1) // length)
    slots = _PROGRAMS * _multiprocessors(q.device)
    tiles = _tiles_of_a_program(lines[0], lines[1] * lines[2] * batch_heads, abreast, length, planes, slots)
    segments = -(-lines[0] // (abreast * tiles))
    grid = (lines[2], lines[1] * abreast * segments, batch_heads)
    if max(grid[1:]) >= 2**16:
        return None
    rest = rows * columns % config.block_kv
    pads = rest > 0 and (rows * columns < config.block_kv or rest * (planes + length - 1) > config.block_kv)
    return Walks(order, grid, tiles, abreast, pads)


@functools.lru_cache(maxsize=256)  # asked for by every call
def _tiles_of_a_program(line: int, lines: int, abreast: int, length: int, planes: int, slots: int) -> int:
    """How many of a line's tiles, `length` queries long, give the fewest planes one after another on `slots` places."""
    shared = length - 2 if (planes + 1) % length == 0 else 0

    def waves(tiles: int) -> int:
        programs = sum(-(-len(range(first, line, abreast)) // tiles) for first in range(abreast))
        return -(-programs * lines // slots)

    def planes_walked(tiles: int) -> int:  # and one's time to begin
        return tiles * (planes + length - 1 - shared) + shared + 1

    return min(range(-(-line // abreast), 0, -1), key=lambda n: waves(n) * planes_walked(n))


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132
