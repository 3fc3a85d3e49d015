"""The fused ops in plain torch: their definition, what a CPU runs, and what the kernels are tested against.

Layouts: tokens (B, T, H, W, C); heads (B, T, H, W, heads, head_dim). Computed in fp32, rounded once.
"""

import torch
import torch.nn.functional as F


def rms_norm(
    x: torch.Tensor, gain: torch.Tensor, *, eps: float, scale: torch.Tensor | None, shift: torch.Tensor | None
) -> torch.Tensor:
    """x / RMS(x) * gain over the last dim, then * scale + shift (each (B, 1, 1, 1, C))."""
    normed = F.rms_norm(x.float(), (x.shape[-1],), gain.float(), eps)
    if scale is not None and shift is not None:
        normed = normed.mul_(scale.float()).add_(shift.float())
    return normed.to(x.dtype)


def rotate_pairs(
    x: torch.Tensor, table: torch.Tensor, split: tuple[int, int, int], firsts: tuple[int, int, int]
) -> torch.Tensor:
    """Neighbouring channels of x (B, T, H, W, heads, head_dim) turned by the angles of their position; fp32.

    See heads.Rotary for the others.
    """
    frames, height, width = x.shape[1:4]
    rows = [table[:, first : first + n] for first, n in zip(firsts, (frames, height, width), strict=True)]
    places = (frames, 1, 1, 1, -1), (1, height, 1, 1, -1), (1, 1, width, 1, -1)
    parts, first = [], 0
    for axis, count in enumerate(split):
        cos, sin = rows[axis][..., first : first + count]
        cos, sin = cos.reshape(places[axis]), sin.reshape(places[axis])
        even, odd = x[..., 2 * first : 2 * (first + count)].float().unflatten(-1, (count, 2)).unbind(-1)
        parts.append(torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2))
        first += count
    return torch.cat(parts, dim=-1)


def norm_and_rotate(
    x: torch.Tensor,
    gain: torch.Tensor,
    table: torch.Tensor,
    split: tuple[int, int, int],
    firsts: tuple[int, int, int],
    *,
    eps: float,
) -> torch.Tensor:
    """Head norm, gain and rotation of x (B, T, H, W, heads, head_dim)."""
    normed = F.rms_norm(x.float(), (x.shape[-1],), gain.float(), eps)
    return rotate_pairs(normed, table, split, firsts).to(x.dtype)


def silu_mul(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up."""
    return (F.silu(gate.float()) * up.float()).to(gate.dtype)


def patches_to_bytes(hidden: torch.Tensor, patch: int) -> torch.Tensor:
    """(B, n, h, w, 3 * patch**2) in about [-1, 1], packed (colour, column, row), to (B, n, h * patch, w * patch, 3)
    uint8: clamped and rounded in fp32.
    """
    x = hidden.float().mul(0.5).add_(0.5).clamp_(0, 1).mul_(255).round_().to(torch.uint8)
    x = x.unflatten(-1, (3, patch, patch)).permute(0, 1, 2, 6, 3, 5, 4)
    return x.flatten(4, 5).flatten(2, 3).contiguous()
