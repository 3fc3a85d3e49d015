"""AITER's na3d_flash_attn, for MI300X and MI350X (ROCm/aiter#5230)."""

import importlib

import torch

from layers.neighborhood_attention.backend import (
    IMPORT_ERRORS,
    Backend,
    Size,
    Target,
    Unserved,
    own_words,
    package_version,
)

ARCHITECTURES = ("gfx942", "gfx950")
_MODULE = "aiter.ops.triton.attention.na3d_flash"


def make_aiter(target: Target) -> Backend:
    """AITER for this target. Takes no offsets.

    Raises ImportError where it is not installed, cannot be imported or lacks na3d_flash, RuntimeError where it does not
    support the architecture or the dtype; the text is the reason, with its remedy.
    """
    try:
        import aiter
    except ModuleNotFoundError as error:
        if error.name != "aiter":
            raise ImportError(f"installed, but its import failed: {own_words(error)}") from error
        _check_target(target)
        raise ImportError("not installed (a build with ROCm/aiter#5230; see docs/backends.md)") from error
    except IMPORT_ERRORS as error:
        raise ImportError(f"installed, but its import failed: {own_words(error)}") from error
    detail = f"AITER {package_version(aiter, 'amd-aiter', 'aiter')}"
    missing = f"{detail} has no na3d_flash (needs a build with ROCm/aiter#5230)"
    try:
        function = getattr(importlib.import_module(_MODULE), "na3d_flash_attn", None)
    except ModuleNotFoundError as error:
        if not f"{_MODULE}.".startswith(f"{error.name}."):
            raise ImportError(f"{detail} is installed, but its import failed: {own_words(error)}") from error
        raise ImportError(missing) from error
    except IMPORT_ERRORS as error:
        raise ImportError(f"{detail} is installed, but its import failed: {own_words(error)}") from error
    if function is None:
        raise ImportError(missing)
    _check_target(target)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kernel_size: Size) -> torch.Tensor:
        reason = limit(k, kernel_size)
        if reason:
            raise Unserved(reason)
        return function(q.contiguous(), k.contiguous(), v.contiguous(), kernel_size)

    return Backend("aiter", attend, takes_offsets=False, detail=detail)


def limit(k: torch.Tensor, kernel_size: Size) -> str | None:
    """Why the kernel cannot take keys of this shape and dtype, if it cannot; its published limits."""
    width, head_dim = k.shape[3], k.shape[5]
    if k.dtype != torch.bfloat16:
        return "not bfloat16"
    if head_dim < 16 or head_dim & (head_dim - 1):
        return "head_dim not a power of two from 16"
    if width < 16:
        return "narrower than 16"
    if kernel_size[2] > 33:
        return "a kernel wider than 33"
    if kernel_size[2] > 17 and width < 32:
        return "a kernel wider than 17 on a grid narrower than 32"
    return None


def _check_target(target: Target) -> None:
    if target.arch not in ARCHITECTURES:
        raise RuntimeError(f"needs {' or '.join(ARCHITECTURES)} (MI300X, MI350X); this is {target.place}")
    if target.dtype != torch.bfloat16:
        raise RuntimeError(f"takes bfloat16 alone and this run is {target.dtype_name} (--dtype bf16)")
