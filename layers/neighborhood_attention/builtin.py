"""The two backends that come with this package: our Triton kernel and tiled SDPA."""

import torch

from layers.neighborhood_attention.backend import (
    AMD,
    OLDEST,
    Backend,
    Size,
    Target,
    Unserved,
    kernel_errors,
    own_words,
    runs_our_triton,
)
from layers.neighborhood_attention.configs import RowConfig
from layers.neighborhood_attention.flash import choose_config, na3d_flash_attn, triton_version
from layers.neighborhood_attention.sdpa import neighborhood_attention_sdpa


def make_triton(target: Target) -> Backend:
    """na3d_flash_attn for this target.

    Raises RuntimeError where Triton is not installed, the architecture or dtype is not supported, or the kernels cannot
    be built or take a kernel size.
    """
    if not runs_our_triton(target.arch):
        raise RuntimeError(f"needs NVIDIA sm{OLDEST} or newer, or {' or '.join(AMD)}; this is {target.place}")
    if target.dtype not in (torch.bfloat16, torch.float16):
        raise RuntimeError(f"takes bfloat16 and float16 and this run is {target.dtype_name} (--dtype bf16)")
    triton_version()
    try:
        names = {kernel: _schedule(target, kernel) for kernel in target.kernel_sizes}
    except kernel_errors() as error:  # on an architecture without measurements this runs both schedules
        raise RuntimeError(f"its schedules cannot be measured: {own_words(error)}") from error
    if len(set(names.values())) == 1:
        detail = f"schedule {next(iter(names.values()))}"
    else:
        detail = ", ".join(f"schedule {name} for {kernel}" for kernel, name in names.items())
    return Backend("triton", _flash, takes_offsets=True, detail=detail, takes_bound=True)


def _schedule(target: Target, kernel: Size) -> str:
    config = choose_config(target.device, kernel, target.head_dim, target.dtype)
    return "row" if isinstance(config, RowConfig) else "tile"


def _flash(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kernel_size: Size, **offsets: object) -> torch.Tensor:
    try:
        return na3d_flash_attn(q, k, v, kernel_size, **offsets)  # type: ignore[arg-type]
    except ValueError as error:  # the call itself was checked before: this is a limit of the kernel
        raise Unserved(str(error)) from error


def make_sdpa(target: Target) -> Backend:
    """Tiled SDPA: any device, any floating dtype."""
    return Backend("sdpa", neighborhood_attention_sdpa, takes_offsets=True)
