"""na3d_flash_attn: 3-D neighborhood flash attention in Triton."""

import functools
import math
import sys
from collections.abc import Sequence
from typing import Any

import torch

from layers.neighborhood_attention import configs
from layers.neighborhood_attention.backend import on_device
from layers.neighborhood_attention.configs import RowConfig, TileConfig
from layers.neighborhood_attention.geometry import Axis, check_inputs
from layers.neighborhood_attention.hopper import plan_walks
from layers.neighborhood_attention.race import faster_schedule

_LOG2E = 1.4426950408889634
_SCAN = 32  # tiles per program of the pass that looks for flagged tiles; about 10,000 programs at 79x192x192, 4 heads
# With |s| <= b in log2 units and the shift max(0, b - 100), the largest p = 2**(s - shift) of a row lies in
# [2**-104, 2**100] while b <= 102: sums stay finite, and fp32 flushes to zero only what is below 2**-22 of that
# largest.
MAX_SOFTMAX_BOUND = 102 / _LOG2E


def na3d_flash_attn(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    kernel_size: Sequence[int],
    *,
    q_start: Sequence[int] = (0, 0, 0),
    kv_start: Sequence[int] = (0, 0, 0),
    grid: Sequence[int] | None = None,
    softmax_bound: float | None = None,
    config: TileConfig | RowConfig | None = None,
) -> torch.Tensor:
    """softmax(q . k) v over every query's kernel_size window: neighborhood_attention_reference, on a GPU.

    q (B, Tq, Hq, Wq, heads, head_dim) pre-scaled by head_dim**-0.5; k, v (B, Tk, Hk, Wk, heads, head_dim); bf16 or
    fp16; head_dim a power of two from 16 to 256; any strides with a unit last one. With positional arguments only it
    is a drop-in for AITER's function of the same name (ROCm/aiter#5230). q_start, kv_start, grid:
    geometry.check_inputs.

    softmax_bound promises |q . k| <= softmax_bound for every pair, as sqrt(head_dim) times the norm gains is for
    RMS-normed q and k; bf16 then needs no maximum and no check. It must lie in [0, MAX_SOFTMAX_BOUND]. Other dtypes
    ignore it. `config` replaces the choice of configs/<arch>.json, for tuning and tests. Values at keys that no query
    sees may be read, so they must be finite.

    Returns q's shape and dtype, contiguous. Raises ValueError for what it cannot take, RuntimeError without Triton.
    """
    axes = check_inputs(q, k, v, kernel_size, q_start=q_start, kv_start=kv_start, grid=grid)
    _check_limits(q, k, v, softmax_bound)
    kernel = (int(kernel_size[0]), int(kernel_size[1]), int(kernel_size[2]))
    if config is None:
        config = choose_config(q.device, kernel, q.shape[5], q.dtype)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    bound = None if softmax_bound is None or q.dtype == torch.float16 else softmax_bound * _LOG2E
    if isinstance(config, RowConfig) and kernel[2] > config.max_kernel_w:
        raise ValueError(f"{config} takes kernels up to {config.max_kernel_w} wide; got {kernel[2]}")
    with on_device(q):
        if isinstance(config, RowConfig):
            _launch_row(q, k, v, out, axes, kernel, bound, config)
        else:
            _launch_tile(q, k, v, out, axes, kernel, bound, config)
    return out


def choose_config(
    device: torch.device, kernel_size: tuple[int, int, int], head_dim: int, dtype: torch.dtype
) -> TileConfig | RowConfig:
    """The config of this device's json; where its schedule was never measured, the winner of a race on the device."""
    arch = configs.load(configs.arch_of(device))
    schedule = arch.schedule(kernel_size, head_dim)
    if schedule == "race":
        if device.type == "cpu":  # the interpreter: there is nothing to time
            schedule = "tile"
        else:
            schedule = faster_schedule(
                arch, device, kernel_size, head_dim, dtype, attend=na3d_flash_attn, triton=triton_version()
            )
    return arch.row(kernel_size, head_dim) if schedule == "row" else arch.tile(kernel_size, head_dim)


@functools.cache
def _kernels() -> Any:
    """The kernel modules; imported here because this package must import where Triton is not installed."""
    try:
        from layers.neighborhood_attention import kernel_row, kernel_tile
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        raise RuntimeError("na3d_flash_attn needs Triton, which is not installed (pip install triton)") from error
    return kernel_row.row_kernel, kernel_tile.tile_kernel, kernel_tile.tile_exact_kernel


def _interpreted() -> bool:
    """Whether Triton runs its kernels in Python (TRITON_INTERPRET=1 before its first import)."""
    kernel = _kernels()[0]
    return not isinstance(kernel, sys.modules["triton"].JITFunction)


def _check_limits(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, softmax_bound: float | None) -> None:
    if q.device.type == "cpu" and not _interpreted():
        raise ValueError("na3d_flash_attn needs a GPU tensor; got cpu (TRITON_INTERPRET=1 runs it there, slowly)")
    allowed = [torch.bfloat16, torch.float16]
    if q.device.type == "cpu":  # the interpreter's bf16 dot is wrong; fp32 has bf16's exponents and stands in for it
        allowed = [torch.float16, torch.float32]
    if q.dtype not in allowed:
        raise ValueError(f"na3d_flash_attn on {q.device.type} takes {' or '.join(map(str, allowed))}; got {q.dtype}")
    head_dim = q.shape[5]
    if not 16 <= head_dim <= 256 or head_dim & (head_dim - 1):
        raise ValueError(f"head_dim {head_dim} must be a power of two from 16 to 256")
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.stride(5) != 1:
            raise ValueError(f"the last stride of {name} must be 1; got {x.stride(5)}")
    if softmax_bound is not None and not 0 <= softmax_bound <= MAX_SOFTMAX_BOUND:
        raise ValueError(f"softmax_bound {softmax_bound} must lie in [0, {MAX_SOFTMAX_BOUND:.2f}]")


def _positions(axes: Sequence[Axis]) -> list[int]:
    """The kernels' geometry, axis by axis: see kernel_math.py."""
    return [
        value
        for a in axes
        for value in (
            a.q_start - a.kv_start, a.q_len, a.kv_len, -a.kv_start, a.length - a.kernel - a.kv_start,
        )
    ]  # fmt: skip


def _amd_options(config: TileConfig | RowConfig) -> dict[str, int]:
    options = {"waves_per_eu": config.waves_per_eu, "matrix_instr_nonkdim": config.mfma_size}
    return {name: value for name, value in options.items() if value and _is_amd()}


def _is_amd() -> bool:
    return torch.version.hip is not None


def _launch_row(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    axes: Sequence[Axis],
    kernel: tuple[int, int, int],
    bound: float | None,
    config: RowConfig,
) -> None:
    batch, t, h, w, heads, head_dim = q.shape
    row_kernel = _kernels()[0]
    row_kernel[(-(-w // config.block_q) * h * t, batch * heads)](
        q, k, v, out, *_positions(axes), heads, _shift(bound), *(x.stride()[:5] for x in (q, k, v, out)),
        *kernel, head_dim, config.block_q, config.block_kv, bound is not None, config.stages,
        num_warps=config.warps, num_stages=config.stages, **_amd_options(config),
    )  # fmt: skip


def _shift(bound: float | None) -> float:
    return 0.0 if bound is None else max(0.0, bound - 100)


def _launch_tile(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    axes: Sequence[Axis],
    kernel: tuple[int, int, int],
    bound: float | None,
    config: TileConfig,
) -> None:
    tile_kernel, exact_kernel = _kernels()[1:]
    batch, heads, head_dim = q.shape[0], q.shape[4], q.shape[5]
    counts = [-(-axis.q_len // n) for axis, n in zip(axes, config.tile, strict=True)]
    tiles = math.prod(counts)
    strides = tuple(x.stride()[:5] for x in (q, k, v, out))
    positions = _positions(axes)
    rows, columns = _union(config, kernel)
    wide = any(rows * s[2] + columns * s[3] + head_dim >= 2**31 for s in strides[1:3])
    keys = (config.block_kv, config.mask_channels, strides[1] == strides[2])
    block = (*kernel, head_dim, *config.tile, *keys)
    options = {"num_warps": config.warps, **_amd_options(config)}
    flags, checked, scan = q, False, 0
    if q.dtype != torch.float16:
        if bound is None:
            checked, scan = True, _SCAN
            flags = torch.empty((batch * heads, tiles), dtype=torch.int32, device=q.device)
        limit = {"maxnreg": config.max_registers} if config.max_registers else {}
        walks = plan_walks(q, k, v, axes, kernel, config)
        if walks:
            flag_steps = (counts[1] * counts[2], counts[2], 1)
            _hopper_kernel()[walks.grid](
                q, k, v, out, flags, *_positions(walks.ordered(axes)), heads, *walks.ordered(flag_steps), tiles,
                walks.tiles, _shift(bound), *map(walks.strides, strides), *walks.ordered(kernel), head_dim,
                *walks.ordered(config.tile), *keys, checked, int(walks.pads_rest), walks.abreast,
                num_warps=config.warps, **limit,
            )  # fmt: skip
        else:
            ptx = config.skip_exp and q.element_size() == 2 and not _is_amd()
            tile_kernel[(tiles, batch * heads)](
                q, k, v, out, flags, *positions, heads, _shift(bound), *strides, *block,
                checked, wide, int(config.pads_rest(kernel)), config.scores_per_thread if ptx else 0,
                config.partial_sums, config.q_in_registers, config.stages, num_stages=config.stages,
                **options, **limit,
            )  # fmt: skip
    if q.dtype == torch.float16 or checked:
        stages = min(config.stages, 2)
        exact_kernel[(-(-tiles // scan) if scan else tiles, batch * heads)](
            q, k, v, out, flags, tiles, *positions, heads, *strides, *block, wide, scan, stages,
            num_stages=stages, **options,
        )  # fmt: skip


@functools.cache
def _hopper_kernel() -> Any:
    """Apart from the others: Gluon is neither interpreted nor compiled for AMD."""
    from layers.neighborhood_attention import kernel_tile_hopper

    return kernel_tile_hopper.tile_hopper_kernel


def _union(config: TileConfig, kernel: tuple[int, int, int]) -> tuple[int, int]:
    """Rows and columns of the union of a tile's windows, with the rows that padding a block of keys may add."""
    rows, columns = (n + kernel_len - 1 for n, kernel_len in zip(config.tile[1:], kernel[1:], strict=True))
    return rows + -(-config.block_kv // columns), columns


def triton_version() -> str:
    """Version of the Triton in use, for logs and caches."""
    _kernels()
    return str(sys.modules["triton"].__version__)
