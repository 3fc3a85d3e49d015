"""Half a block of few channels in one kernel each: norm to Q, K, V, and norm through gated MLP to residual.

A row's RMSNorm is one factor, so it commutes with the product that follows: gain, scale and shift go into the weights
once per step (`fold_norm`), the kernels multiply the tokens as they lie in memory and apply the factor to the product.
Tokens are (B, T, H, W, C). `pending` is what has still to be added to every token: the biases of the products that were
added to the residual in place.
"""

from dataclasses import dataclass

import torch

from layers.fused.heads import HeadNorms, Rotary
from layers.fused.launch import blocks, check_dense, kernels, matrix, runs_kernels, token_strides
from layers.neighborhood_attention.backend import on_device

MAX_CHANNELS = 256
"""A tile of tokens, its residual in fp32 and the weights of a step must fit a multiprocessor."""


@dataclass(frozen=True)
class FoldedLinear:
    """weight (units, C) in the tokens' dtype; before and after (units,) fp32:

    linear(rms_norm(x + pending) * scale + shift) = (x @ weight.T + before) / RMS(x + pending) + after.
    """

    weight: torch.Tensor
    before: torch.Tensor
    after: torch.Tensor


def fold_norm(
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    gain: torch.Tensor,
    modulation: tuple[torch.Tensor, torch.Tensor] | None,
    pending: torch.Tensor,
) -> FoldedLinear:
    """weight (units, C) and bias of a linear layer behind a norm with this gain and (scale, shift), all (C,)."""
    full = weight.float()
    scale, shift = modulation or (torch.ones_like(gain), torch.zeros_like(gain))
    folded = (full * (gain.float() * scale.float())).to(weight.dtype)
    after = full @ shift.float()
    if bias is not None:
        after = after + bias.float()
    return FoldedLinear(folded, folded.float() @ pending.float(), after)


@dataclass(frozen=True)
class PackedMlp:
    """Weights as mlp_kernel walks through them: for every block of hidden units their gate rows, then their up rows;
    w_down transposed, (hidden, C)."""

    into: FoldedLinear
    w_down: torch.Tensor


def serves(x: torch.Tensor, *, hidden: int, head_dim: int) -> bool:
    """Whether the kernels take blocks of tokens like x (only its last dim counts), with so many hidden units."""
    channels, block = x.shape[-1], blocks(x.device).mlp[1]
    return (
        runs_kernels(x)
        and 32 <= channels <= MAX_CHANNELS
        and channels & (channels - 1) == 0
        and 16 <= head_dim <= channels
        and head_dim & (head_dim - 1) == 0
        and hidden % block == 0
    )


def pack_mlp(gate: FoldedLinear, up: FoldedLinear, w_down: torch.Tensor) -> PackedMlp:
    """gate and up (hidden, C) behind the same norm, w_down (C, hidden) of a plain linear layer."""
    block = blocks(w_down.device).mlp[1]

    def woven(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.stack((a.unflatten(0, (-1, block)), b.unflatten(0, (-1, block))), dim=1).flatten(0, 2)

    into = FoldedLinear(woven(gate.weight, up.weight), woven(gate.before, up.before), woven(gate.after, up.after))
    return PackedMlp(into, w_down.t().contiguous())


def project_heads(
    x: torch.Tensor,
    pending: torch.Tensor,
    into: FoldedLinear,
    norms: HeadNorms,
    rotary: Rotary,
    *,
    eps: float,
    out: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
) -> None:
    """Q, K, V of norm(x + pending), normed per head, Q scaled, Q and K rotated, into three tensors (B, T, H, W, heads,
    head_dim) with a unit last stride. `into` has the rows of Q, then K, then V.
    """
    chosen = blocks(x.device)
    block_m, warps, stages = chosen.qkv
    heads, head_dim = out[0].shape[-2:]
    frames, height, width = x.shape[1:4]
    w = matrix(into.weight, head_dim, tma=chosen.tma)
    for x_b, *out_b in zip(_matrices(x), *out, strict=True):
        with on_device(x):
            kernels()[1].qkv_kernel[(-(-len(x_b) // block_m),)](
                matrix(x_b, block_m, tma=chosen.tma), pending, w, into.before, into.after, norms.gains, rotary.table,
                rotary.table.shape[1], *rotary.firsts, *out_b, frames, height, width, eps, norms.eps,
                *(token_strides(y[None]) for y in out_b),
                C=x.shape[-1], HEADS=heads, HEAD_DIM=head_dim, T_PAIRS=rotary.split[0], H_PAIRS=rotary.split[1],
                BLOCK_M=block_m, STAGES=stages, TMA=chosen.tma, num_warps=warps, num_stages=stages,
            )  # fmt: skip


def gated_mlp_(x: torch.Tensor, pending: torch.Tensor, weights: PackedMlp, *, eps: float) -> torch.Tensor:
    """x += pending + w_down(silu(gate) * up) in place, gate and up of norm(x + pending)."""
    chosen = blocks(x.device)
    block_m, block_h, warps, stages = chosen.mlp
    channels = x.shape[-1]
    into, tma = weights.into, chosen.tma
    w_in, w_down = matrix(into.weight, 2 * block_h, tma=tma), matrix(weights.w_down, block_h, tma=tma)
    for x_b in _matrices(x):
        with on_device(x):
            kernels()[2].mlp_kernel[(-(-len(x_b) // block_m),)](
                matrix(x_b, block_m, tma=tma), pending, w_in, into.before, into.after, w_down, x_b, len(x_b), eps,
                C=channels, HIDDEN=len(weights.w_down), BLOCK_M=block_m, BLOCK_H=block_h, STAGES=stages,
                TMA=tma, PTX=x.is_cuda and torch.version.hip is None, num_warps=warps, num_stages=stages,
                **({"matrix_instr_nonkdim": chosen.mfma} if chosen.mfma else {}),
            )  # fmt: skip
    return x


def _matrices(x: torch.Tensor) -> list[torch.Tensor]:
    """(tokens, C) of each batch entry, views."""
    check_dense("x", x)
    return [x_b.view(-1, x.shape[-1]) for x_b in x]
