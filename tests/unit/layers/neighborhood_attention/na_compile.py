"""The launches of a neighborhood attention, compiled for GPUs that are not here: see triton_compile.py."""

import contextlib
import math
from collections.abc import Iterator
from unittest import mock

import torch
from triton_compile import TARGETS, Recorder, facts_of, source_of

from layers.neighborhood_attention import flash
from layers.neighborhood_attention.configs import RowConfig, TileConfig


@contextlib.contextmanager
def recorded_launches(amd: bool) -> Iterator[list]:
    launches: list = []
    stand_ins = tuple(Recorder(kernel, launches) for kernel in flash._kernels())
    hopper = Recorder(flash._hopper_kernel(), launches)
    with (
        mock.patch.object(flash, "_kernels", return_value=stand_ins),
        mock.patch.object(flash, "_hopper_kernel", return_value=hopper),
        mock.patch.object(flash, "_is_amd", return_value=amd),
    ):
        yield launches


def launches_of(arch: str, config, kernel_size, head_dim: int, *, dtype=torch.bfloat16, bound=None) -> list:
    """Launches of one call on the strided views of a fused QKV projection, at a grid of a decoder's size."""
    grid = [max(n, k) for n, k in zip((32, 96, 96), kernel_size, strict=True)]
    qkv = torch.empty(1, *grid, 3, 4, head_dim, dtype=dtype, device="meta")
    with (
        recorded_launches(amd=TARGETS[arch][0] == "hip") as launches,
        mock.patch.object(flash, "_check_limits"),
    ):
        flash.na3d_flash_attn(*qkv.unbind(4), kernel_size, softmax_bound=bound, config=config)
    return launches


def specializations(grid: tuple[int, int, int]) -> list:
    """What the JIT compiles apart for a call on this grid: the specialised arguments and constants of each launch."""
    keys = []
    hopper = TileConfig((4, 4, 4), 64, 4, 2, skip_exp=True, walk="t")
    for config in (TileConfig((4, 4, 4), 64, 4, 2), hopper, RowConfig(17, 16, 32, 4, 2)):
        qkv = torch.empty(1, *grid, 3, 4, 64, dtype=torch.bfloat16, device="meta")
        with recorded_launches(amd=False) as launches, mock.patch.object(flash, "_check_limits"):
            flash.na3d_flash_attn(*qkv.unbind(4), (3, 5, 5), config=config)
        for launch in launches:
            source, options = source_of(launch)
            keys.append((source.signature, source.constants, sorted(map(str, source.attrs.items())), options))
    return [str(key) for key in keys]


def compile_facts(arch: str, config: TileConfig | RowConfig, kernel_size, head_dim: int, **call) -> list[dict]:
    """The facts of each launch of the call, with flops_per_block of each loop that multiplies."""
    facts = []
    for launch in launches_of(arch, config, kernel_size, head_dim, **call):
        fact = facts_of(arch, launch)
        fact["flops_per_block"] = [flops * config.warps for flops in fact.pop("flops_per_warp")]
        facts.append(fact)
    return facts


def algebraic_flops(config: TileConfig | RowConfig, head_dim: int) -> int:
    """Multiplications and additions of one step over block_kv keys: scores, mask product, probabilities x values."""
    if isinstance(config, RowConfig):
        return 2 * config.block_q * config.block_kv * 2 * head_dim
    return 2 * math.prod(config.tile) * config.block_kv * (2 * head_dim + config.mask_channels)
