"""RMSNorm with modulation and residual, and the gated product, each one pass over tokens (B, T, H, W, C)."""

import torch

from layers.fused import reference
from layers.fused.launch import check_dense, kernels, runs_kernels
from layers.neighborhood_attention.backend import on_device

_TILE = 4096  # elements of a program
_BLOCK = 4096


def rms_norm(
    x: torch.Tensor,
    gain: torch.Tensor,
    *,
    eps: float,
    scale: torch.Tensor | None = None,
    shift: torch.Tensor | None = None,
) -> torch.Tensor:
    """x / RMS(x) * gain over the last dim, then * scale + shift (each (B, 1, 1, 1, C)); a new tensor.

    x is contiguous within a batch entry, and scale and shift are given together, else ValueError. Computed in fp32,
    rounded once.
    """
    _check(x, x, scale, shift)
    if not runs_kernels(x):
        return reference.rms_norm(x, gain, eps=eps, scale=scale, shift=shift)
    return _norm(x, None, gain, eps=eps, scale=scale, shift=shift)


def add_rms_norm_(
    x: torch.Tensor,
    y: torch.Tensor,
    gain: torch.Tensor,
    *,
    eps: float,
    scale: torch.Tensor | None = None,
    shift: torch.Tensor | None = None,
) -> torch.Tensor:
    """x += y in place, y of the same shape, and rms_norm of the sum as it was stored. Raises as rms_norm does."""
    _check(x, y, scale, shift)
    if not runs_kernels(x):
        x += y
        return reference.rms_norm(x, gain, eps=eps, scale=scale, shift=shift)
    return _norm(x, y, gain, eps=eps, scale=scale, shift=shift)


def silu_mul_(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """gate = silu(gate) * up in place; both contiguous, of one shape."""
    if gate.shape != up.shape or not (gate.is_contiguous() and up.is_contiguous()):
        raise ValueError(f"gate {tuple(gate.shape)} and up {tuple(up.shape)} must be contiguous and of one shape")
    if not runs_kernels(gate):
        return gate.copy_(reference.silu_mul(gate, up))
    with on_device(gate):
        kernels()[0].silu_mul_kernel[(-(-gate.numel() // _BLOCK),)](gate, up, gate.numel(), BLOCK=_BLOCK, num_warps=4)
    return gate


def _check(x: torch.Tensor, y: torch.Tensor, scale: torch.Tensor | None, shift: torch.Tensor | None) -> None:
    if (scale is None) != (shift is None):
        raise ValueError("scale and shift are given together or not at all")
    if x.shape != y.shape:
        raise ValueError(f"x {tuple(x.shape)} and y {tuple(y.shape)} must be of one shape")


def _norm(
    x: torch.Tensor,
    y: torch.Tensor | None,
    gain: torch.Tensor,
    *,
    eps: float,
    scale: torch.Tensor | None,
    shift: torch.Tensor | None,
) -> torch.Tensor:
    channels = x.shape[-1]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    tokens = x[0].numel() // channels
    block_c = 1 << (channels - 1).bit_length()
    block_m = max(1, _TILE // block_c)
    if scale is not None and shift is not None:
        scale, shift = scale.contiguous(), shift.contiguous()
    with on_device(x):
        kernels()[0].norm_kernel[(-(-tokens // block_m), x.shape[0])](
            x, x if y is None else y, gain, x if scale is None else scale, x if shift is None else shift, out,
            tokens, eps, check_dense("x", x), 0 if y is None else check_dense("y", y), out.stride(0),
            C=channels, BLOCK_C=block_c, BLOCK_M=block_m, ADDS=y is not None, MODULATED=scale is not None, num_warps=4,
        )  # fmt: skip
    return out
