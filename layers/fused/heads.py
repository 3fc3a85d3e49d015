"""Head norms, the scale of Q and the 3-D rotary embedding: one pass from the product for Q, K, V to where they go."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from layers.fused import reference
from layers.fused.launch import check_dense, kernels, runs_kernels, token_strides
from layers.neighborhood_attention.backend import Size, on_device

_TILE = 4096  # elements of a program
_MARGIN = 1.01  # Q and K are rounded to bf16 after the norm: each can grow by 2**-8


@dataclass(frozen=True)
class HeadNorms:
    """Gains (2, head_dim) fp32 of Q, times its scale, and of K; eps of both norms."""

    gains: torch.Tensor
    eps: float


@dataclass(frozen=True)
class Rotary:
    """Cosines and sines (2, T + H + W, head_dim / 2) fp32: a row per position of each axis, valid in the channels of
    that axis. `split` says how many pairs of channels T, H and W have, `firsts` which rows the first token has.
    """

    table: torch.Tensor
    split: Size
    firsts: Size

    def part(self, starts: Size) -> "Rotary":
        """Of tokens that begin at `starts` (T, H, W) of this one's."""
        t, h, w = (a + b for a, b in zip(self.firsts, starts, strict=True))
        return replace(self, firsts=(t, h, w))


def rotary_table(frequencies: Sequence[torch.Tensor], counts: Sequence[int]) -> Rotary:
    """Angles of a grid of `counts` (T, H, W) positions; `frequencies` of each axis are fp32 (pairs,). Each angle is
    position times frequency in fp32, as diffusers' LTX2VideoVaeRotaryPosEmbed3D computes it.
    """
    split = tuple(len(f) for f in frequencies)
    rows = []
    for axis, count in enumerate(counts):
        own = frequencies[axis]
        angles = own.new_zeros((count, sum(split)))
        positions = torch.arange(count, dtype=torch.float32, device=own.device)
        angles[:, sum(split[:axis]) : sum(split[: axis + 1])] = positions[:, None] * own
        rows.append(angles)
    angles = torch.cat(rows)
    firsts = (0, counts[0], counts[0] + counts[1])
    return Rotary(torch.stack((angles.cos(), angles.sin())), (split[0], split[1], split[2]), firsts)


def norm_rotate_heads(
    qkv: torch.Tensor, norms: HeadNorms, rotary: Rotary, *, out: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
) -> None:
    """Q, K, V out of the product qkv (B, T, H, W, 3 * heads * head_dim), contiguous within a batch entry.

    Q and K are normed per head and rotated, V is copied. `out` are three (B, T, H, W, heads, head_dim) tensors of any
    strides with a unit last one; views of qkv's own memory are allowed.
    """
    q, k, v = out
    batch, frames, height, width, heads, head_dim = q.shape
    parts = qkv.unflatten(-1, (3, heads, head_dim))
    if not runs_kernels(qkv):
        for which, target in enumerate((q, k)):
            target.copy_(
                reference.norm_and_rotate(
                    parts[..., which, :, :],
                    norms.gains[which],
                    rotary.table,
                    rotary.split,
                    rotary.firsts,
                    eps=norms.eps,
                )
            )
        v.copy_(parts[..., 2, :, :])
        return
    block_heads = min(heads & -heads, max(1, _TILE // head_dim))
    block_m = max(1, _TILE // (block_heads * head_dim))
    with on_device(qkv):
        kernels()[0].heads_kernel[(-(-frames * height * width // block_m), 3 * heads // block_heads, batch)](
            qkv, norms.gains, rotary.table, rotary.table.shape[1], *rotary.firsts, q, k, v, frames, height, width,
            norms.eps, check_dense("qkv", qkv),
            *(token_strides(x) for x in out), HEADS=heads, HEAD_DIM=head_dim, T_PAIRS=rotary.split[0],
            H_PAIRS=rotary.split[1], BLOCK_M=block_m, BLOCK_HEADS=block_heads, num_warps=4,
        )  # fmt: skip


def softmax_bound(q_gain: torch.Tensor, k_gain: torch.Tensor) -> torch.Tensor:
    """The largest |q . k| of RMS-normed, rotated q (pre-scaled by head_dim**-0.5) and k with these norm gains.

    A normed head has length sqrt(head_dim), a rotation mixes the two channels of a pair only: so the score is at most
    sqrt(head_dim) times the largest product over pairs of the pair's larger gains. A scalar on the gains' device.
    """
    q_pairs, k_pairs = (gain.float().abs().unflatten(-1, (-1, 2)).amax(dim=-1) for gain in (q_gain, k_gain))
    return (q_pairs * k_pairs).amax() * q_gain.shape[-1] ** 0.5 * _MARGIN
