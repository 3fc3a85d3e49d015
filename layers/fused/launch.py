"""Where the kernels run, and with which blocks."""

import functools
import logging
import sys
from dataclasses import dataclass
from typing import Any

import torch

from layers.neighborhood_attention.backend import architecture, runs_our_triton

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Blocks:
    """mlp: tokens and hidden units of a tile, warps, stages of the loop over weights; qkv: tokens, warps, stages (one
    step of its loop is one head). tma: matrices are loaded through descriptors. mfma: edge of AMD's matrix instruction
    in the mlp (matrix_instr_nonkdim), 0 leaves it to the compiler."""

    mlp: tuple[int, int, int, int]
    qkv: tuple[int, int, int]
    tma: bool = False
    mfma: int = 0


# gfx, sm80, sm100: what compiles without spills (tests/unit/layers/fused/test_fused_compile.py), not measured. On gfx
# the 16-wide matrix instruction lets 8 warps share an mlp tile without repeating each other's products and leaves room
# for a second wave on each SIMD, which works on activations while the first multiplies; 32-wide there is room for one.
BLOCKS = {
    "sm90": Blocks(mlp=(128, 32, 8, 3), qkv=(64, 4, 2), tma=True),
    "sm100": Blocks(mlp=(128, 32, 8, 2), qkv=(128, 8, 2), tma=True),
    "sm80": Blocks(mlp=(64, 32, 8, 2), qkv=(64, 4, 2)),
    "gfx942": Blocks(mlp=(128, 16, 8, 2), qkv=(128, 8, 2), mfma=16),
    "gfx950": Blocks(mlp=(128, 32, 8, 2), qkv=(128, 8, 2), mfma=16),
    "default": Blocks(mlp=(64, 32, 8, 2), qkv=(64, 4, 2)),
}


@functools.cache
def blocks(device: torch.device) -> Blocks:
    """Those of this device's architecture."""
    return BLOCKS.get(architecture(device), BLOCKS["default"])


@functools.cache
def kernels() -> Any:
    """The kernel modules; None, said once, where Triton is not installed."""
    try:
        from layers.fused import kernel_mlp, kernel_qkv, kernel_tokens
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        logger.info("fused kernels: Triton is not installed; plain torch instead")
        return None
    return kernel_tokens, kernel_qkv, kernel_mlp


def runs_kernels(x: torch.Tensor) -> bool:
    """Whether a kernel takes this tensor: bf16 or fp16 on a GPU; fp32 or fp16 where Triton interprets kernels."""
    if x.device in _REFUSED:
        return False
    if x.is_cuda:
        return x.dtype in (torch.bfloat16, torch.float16) and kernels() is not None and served(architecture(x.device))
    return x.device.type == "cpu" and "triton" in sys.modules and interpreted() and x.dtype != torch.bfloat16


_REFUSED: set[torch.device] = set()


def refuse(device: torch.device, reason: str) -> None:
    """Run plain torch on this device from now on."""
    _REFUSED.add(device)
    logger.warning("fused kernels: %s; plain torch instead", reason)


@functools.cache
def served(arch: str) -> bool:
    """Whether the kernels are for this architecture; said once if not."""
    found = runs_our_triton(arch)
    if not found:
        logger.info("fused kernels: not for %s; plain torch instead", arch)
    return found


def interpreted() -> bool:
    """Whether Triton runs its kernels in Python (TRITON_INTERPRET=1 before its first import)."""
    found = kernels()
    return found is not None and not isinstance(found[0].norm_kernel, sys.modules["triton"].JITFunction)


def token_strides(x: torch.Tensor) -> tuple[int, ...]:
    """Strides of B, T, H, W and heads of (B, T, H, W, heads, head_dim); the last one must be 1."""
    if x.stride(-1) != 1:
        raise ValueError(f"the last stride must be 1; got strides {x.stride()}")
    return x.stride()[:-1]


def check_dense(name: str, x: torch.Tensor) -> int:
    """The batch stride of tokens (B, T, H, W, C) that are contiguous within a batch entry; else ValueError."""
    if not x[0].is_contiguous():
        raise ValueError(
            f"{name} must be contiguous within a batch entry; got strides {x.stride()} of {tuple(x.shape)}"
        )
    return x.stride(0)


def matrix(x: torch.Tensor, rows: int, *, tma: bool) -> Any:
    """A (n, C) matrix as a kernel takes it, in blocks of `rows` whole rows."""
    if not tma:
        return x
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor.from_tensor(x, [rows, x.shape[-1]])
