"""Bytes of device memory that the exact decode needs beside the weights, and the chunk that fits.

Counted from what the nodes hold; tests compare it with what they allocate.
"""

from collections.abc import Mapping
from typing import Any

import torch

from layers.neighborhood_attention.geometry import window_start
from runner_models.ltx2.decoder.geometry import Stage, ghost_latents, split_rows, stages_of
from runner_models.ltx2.decoder.pointwise import SLICE_TOKENS

SLICE_TENSORS = 16
"""Live (tokens, channels) temporaries of one slice in pointwise.SlicedTokens on a CPU, where four of the MLP are four
times as wide. With kernels there are 9 (norm, gate, up); FusedTokens has none."""
MAX_CHUNK_FRAMES = 32
"""A larger chunk gains little: a chunk copies K - 1 = 10 frames of keys and values whatever its length."""
SAFE_PART = 0.9
"""Of the free memory: the estimate leaves out what the allocator loses."""


def decode_bytes(
    config: Mapping[str, Any],
    latent_grid: tuple[int, int, int],
    *,
    element: int,
    chunk_frames: int | None = None,
    ranks: int = 1,
    steps: int = 1,
) -> int:
    """Peak bytes of one rank, weights left out, for latents of (frames, rows, columns).

    `element` is bytes per number; chunk_frames None decodes the clip at once; `ranks` share its longer axis.
    """
    stages = stages_of(config, latent_grid)
    last = stages[-1]
    axis = 2 if latent_grid[2] > latent_grid[1] else 1
    share = split_rows(latent_grid[axis], ranks)[0][1]
    out_channels = config["out_channels"] * config["patch_size"] ** 2
    whole = 8 * (latent_grid[0] + ghost_latents(config))
    chunk = min(chunk_frames or whole, whole)
    canvas = last.grid[0] * _frame(last, axis, last.grid[axis])[0] // last.channels * out_channels
    state = working = 0
    for stage in stages:
        frames, cap = stage.grid[0], min(stage.cap(chunk, last.scale[0]), stage.grid[0])
        kernel = stage.kernel[0]
        own, extended = _frame(stage, axis, share * stage.scale[axis])
        blocks = stage.depth * (steps if stage is last else 1)
        streams = cap < frames
        if streams:
            state += blocks * (2 * (kernel - 1) * extended + 2 * (kernel // 2) * own)
        # One block at work: K, V; Q, residual and the attention's result; what waits to be pushed below it.
        halo = cap + kernel - 1 if streams else frames
        busy = 2 * halo * extended + 2 * (cap + kernel // 2 * streams) * own + cap * own * (2 if ranks > 1 else 1)
        slice_frames = max(1, min(cap, SLICE_TOKENS["accelerator"] * stage.channels // own))
        working = max(working, busy + streams * 2 * cap * own + SLICE_TENSORS * slice_frames * own)
        if stage is last:
            state += (min(frames, cap + blocks * (kernel // 2)) if streams else frames) * own
            state += 0 if streams else canvas // ranks
    return max(state + working, canvas) * element


def _frame(stage: Stage, axis: int, rows: int) -> tuple[int, int]:
    """Numbers in one frame of `rows` rows, and with the rows of a halo on both sides."""
    length, kernel = stage.grid[axis], stage.kernel[axis]
    per_row = stage.grid[1] * stage.grid[2] // length * stage.channels
    middle = (length - rows) // 2
    first, last = window_start(middle, kernel, length), window_start(middle + rows - 1, kernel, length) + kernel
    return rows * per_row, (rows if rows == length else last - first) * per_row


def choose_chunk(
    config: Mapping[str, Any],
    latent_grid: tuple[int, int, int],
    *,
    element: int,
    free_bytes: int,
    streaming: bool,
    ranks: int = 1,
    steps: int = 1,
) -> int | None:
    """Frames a chunk; 8 where nothing fits.

    None, the whole clip, where that fits and `streaming` is not asked for, or where it is short and needs less.
    """

    def fits(chunk: int | None) -> bool:
        needed = decode_bytes(config, latent_grid, element=element, chunk_frames=chunk, ranks=ranks, steps=steps)
        return needed <= SAFE_PART * free_bytes

    if not streaming and fits(None):
        return None
    for chunk in (*range(MAX_CHUNK_FRAMES, 0, -8), None):
        if fits(chunk):
            return chunk
    return 8


def free_bytes(device: torch.device) -> int:
    """What this process can still allocate: free on the GPU or cached by the allocator; a CPU's available memory."""
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + cached
    import psutil

    return psutil.virtual_memory().available
