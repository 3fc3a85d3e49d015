"""NATTEN's na3d: the installed package, else the hub's kernel of that name through `kernels`."""

import os
from collections.abc import Callable
from typing import Any

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

HUB_KERNEL = "shi-labs/natten"
_OLDEST = 80  # bf16 on tensor cores


def make_natten(target: Target) -> Backend:
    """NATTEN for this target. Takes no offsets.

    Raises ImportError where it is not installed, cannot be imported or lacks na3d, RuntimeError where it does not
    support the architecture; the text is the reason, with its remedy.
    """
    try:
        import natten
    except ModuleNotFoundError as error:
        if error.name != "natten":
            raise ImportError(f"installed, but its import failed: {own_words(error)}") from error
        _check_architecture(target)
        na3d, detail = _from_hub()
    except IMPORT_ERRORS as error:
        raise ImportError(f"installed, but its import failed: {own_words(error)}") from error
    else:
        detail = f"NATTEN {package_version(natten, 'natten')}"
        if not hasattr(natten, "na3d"):
            raise ImportError(f"{detail} has no na3d (pip install -U natten)")
        na3d = natten.na3d
        _check_architecture(target)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kernel_size: Size) -> torch.Tensor:
        if any(length < kernel for length, kernel in zip(k.shape[1:4], kernel_size, strict=True)):
            raise Unserved("a grid below the kernel")
        if min(kernel_size) < 2:
            raise Unserved("a kernel size of 1")
        # It gives wrong values for strided tensors, without an error.
        return na3d(q.contiguous(), k.contiguous(), v.contiguous(), kernel_size=kernel_size, scale=1.0)

    return Backend("natten", attend, takes_offsets=False, detail=detail)


def _check_architecture(target: Target) -> None:
    capability = target.compute_capability
    if capability is None or capability < _OLDEST:
        raise RuntimeError(f"needs an NVIDIA GPU, sm{_OLDEST} or newer; this is {target.place}")


def _from_hub() -> tuple[Callable[..., torch.Tensor], str]:
    """na3d of the hub's kernel. Whether that is allowed: the variable that diffusers reads too."""
    try:
        from kernels import get_kernel
    except ModuleNotFoundError as error:
        if error.name != "kernels":
            raise ImportError(f"not installed, and the import of kernels failed: {own_words(error)}") from error
        raise ImportError("not installed (pip install natten, or see docs/backends.md)") from error
    except IMPORT_ERRORS as error:
        raise ImportError(f"not installed, and the import of kernels failed: {own_words(error)}") from error
    if os.environ.get("DIFFUSERS_DISABLE_REMOTE_CODE", "").upper() in ("1", "ON", "YES", "TRUE"):
        raise ImportError(
            f"not installed, and DIFFUSERS_DISABLE_REMOTE_CODE forbids the hub's {HUB_KERNEL} (pip install natten, or "
            "unset it)"
        )
    from huggingface_hub.errors import HfHubHTTPError  # kernels needs it

    # No build for this torch and GPU, an empty cache offline, 404 and a revoked token are OSErrors or ValueErrors; no
    # network is an error of the HTTP client, whose base this is. What is fetched is then imported.
    errors: tuple[type[BaseException], ...] = (*IMPORT_ERRORS, *HfHubHTTPError.__bases__)
    try:
        kernel: Any = get_kernel(HUB_KERNEL, version=1)
        return kernel.na3d, f"{HUB_KERNEL} of the hub"
    except errors as error:
        raise ImportError(
            f"not installed, and the hub's {HUB_KERNEL} cannot be had: {own_words(error)} (pip install natten, or see "
            "docs/backends.md)"
        ) from error
