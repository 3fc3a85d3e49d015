"""What a block does to each token alone: from the residual to Q, K, V, and from the attention's result to the residual.

Two ways to compute the same on the weights of a stock block: `SlicedTokens`, library products between single passes,
for any width and device, and `FusedTokens`, one kernel a half, for few channels on a GPU. Layout (B, T, H, W, C).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F

from layers.fused import narrow
from layers.fused.heads import HeadNorms, Rotary, norm_rotate_heads, rotary_table
from layers.fused.tokens import add_rms_norm_, rms_norm, silu_mul_
from layers.neighborhood_attention.backend import Size
from runner_models.ltx2.qkv import joint_weights, plain_linear

Heads = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Modulation:
    """Scale (1 added) and shift of both norms of a diffusion block at one timestep, each (B, 1, 1, 1, C); the same for
    every entry of the batch."""

    attn_scale: torch.Tensor
    attn_shift: torch.Tensor
    mlp_scale: torch.Tensor
    mlp_shift: torch.Tensor


class Pointwise(Protocol):
    """Both halves. `frames` (B, n, H, W, C), contiguous within a batch entry, are changed in place."""

    def project(self, frames: torch.Tensor, context: torch.Tensor | None, starts: Size, out: Heads) -> None:
        """Add the projected context, then put Q (scaled), K and V into `out`, (B, n, H, W, heads, head_dim) each; the
        first token lies at `starts` (T, H, W) of the whole grid."""
        ...

    def finish(self, frames: torch.Tensor, attended: torch.Tensor) -> None:
        """Add the attention's result (B, n, H, W, heads, head_dim), projected, then the MLP's."""
        ...


def pointwise(stock: Any, modulation: Modulation | None, grid: Size, like: torch.Tensor) -> Pointwise:
    """The faster way that there is for this block, for frames like `like` (device, dtype and channels count).

    `grid` (T, H, W) is the whole one, of which frames are parts.
    """
    hidden, head_dim = stock.mlp.w_gate.out_features, stock.attn.head_dim
    if narrow.serves(like, hidden=hidden, head_dim=head_dim):
        return FusedTokens(stock, modulation, grid)
    return SlicedTokens(stock, modulation, grid)


class SlicedTokens:
    """One op after the other, in slices of frames so that what lies between them stays small."""

    def __init__(self, stock: Any, modulation: Modulation | None, grid: Size) -> None:
        self.stock, self.norms = stock, head_norms(stock.attn)
        self.rotary = rotary_of(stock.attn, grid, stock.norm1.weight.device)
        self.w_down = plain_linear(stock.mlp, "w_down").weight
        self.norm1: dict[str, Any] = {"gain": stock.norm1.weight, "eps": stock.norm1.eps}
        self.norm2: dict[str, Any] = {"gain": stock.norm2.weight, "eps": stock.norm2.eps}
        if modulation is not None:
            self.norm1 |= {"scale": modulation.attn_scale, "shift": modulation.attn_shift}
            self.norm2 |= {"scale": modulation.mlp_scale, "shift": modulation.mlp_shift}

    def project(self, frames: torch.Tensor, context: torch.Tensor | None, starts: Size, out: Heads) -> None:
        """See Pointwise."""
        weights = joint_weights(self.stock.attn)
        for index, x in frame_slices(frames):
            if context is None:
                normed = rms_norm(x, **self.norm1)
            else:
                normed = add_rms_norm_(x, self.stock.context_proj(context[:, index]), **self.norm1)
            rotary = self.rotary.part((starts[0] + index.start, *starts[1:]))
            q, k, v = (y[:, index] for y in out)
            norm_rotate_heads(F.linear(normed, *weights), self.norms, rotary, out=(q, k, v))

    def finish(self, frames: torch.Tensor, attended: torch.Tensor) -> None:
        """See Pointwise."""
        mlp = self.stock.mlp
        for index, x in frame_slices(frames):
            normed = add_rms_norm_(x, self.stock.attn.to_out[0](attended[:, index].flatten(-2)), **self.norm2)
            add_product_(x, silu_mul_(mlp.w_gate(normed), mlp.w_up(normed)), self.w_down)


class FusedTokens:
    """See layers/fused/narrow.py. Norms and modulation are folded into the weights here, once per decoding step."""

    def __init__(self, stock: Any, modulation: Modulation | None, grid: Size) -> None:
        attn, mlp = stock.attn, stock.mlp
        self.eps1, self.eps2 = stock.norm1.eps, stock.norm2.eps
        self.norms, self.rotary = head_norms(attn), rotary_of(attn, grid, stock.norm1.weight.device)
        self.to_out = plain_linear(attn, "to_out.0")
        # What the products that are added in place leave out.
        self.pending1 = torch.zeros_like(stock.norm1.weight, dtype=torch.float32)
        self.context_proj = None
        if hasattr(stock, "context_proj"):
            self.context_proj = plain_linear(stock, "context_proj")
            self.pending1 += self.context_proj.bias
        self.pending2 = self.pending1 + self.to_out.bias.float()
        norm1 = norm2 = None
        if modulation is not None:
            norm1 = (modulation.attn_scale[0].flatten(), modulation.attn_shift[0].flatten())
            norm2 = (modulation.mlp_scale[0].flatten(), modulation.mlp_shift[0].flatten())
        self.into_heads = narrow.fold_norm(*joint_weights(attn), stock.norm1.weight, norm1, self.pending1)
        gate, up = (
            narrow.fold_norm(plain_linear(mlp, name).weight, None, stock.norm2.weight, norm2, self.pending2)
            for name in ("w_gate", "w_up")
        )
        self.mlp = narrow.pack_mlp(gate, up, plain_linear(mlp, "w_down").weight)

    def project(self, frames: torch.Tensor, context: torch.Tensor | None, starts: Size, out: Heads) -> None:
        """See Pointwise."""
        if context is not None and self.context_proj is not None:
            add_product_(frames, context, self.context_proj.weight)
        rotary = self.rotary.part(starts)
        narrow.project_heads(frames, self.pending1, self.into_heads, self.norms, rotary, eps=self.eps1, out=out)

    def finish(self, frames: torch.Tensor, attended: torch.Tensor) -> None:
        """See Pointwise."""
        add_product_(frames, attended.flatten(-2), self.to_out.weight)
        narrow.gated_mlp_(frames, self.pending2, self.mlp, eps=self.eps2)


SLICE_TOKENS = {"cpu": 2**14, "accelerator": 2**17}
"""Tokens that go through SlicedTokens at once; 2**17 of 512 channels are two temporaries of 512 MiB in the MLP."""


def frame_slices(frames: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor]]:
    """(B, T, H, W, ...) in slices of whole frames; each with its place on T."""
    tokens = frames.shape[0] * frames.shape[2] * frames.shape[3]
    step = max(1, SLICE_TOKENS["cpu" if frames.device.type == "cpu" else "accelerator"] // tokens)
    for first in range(0, frames.shape[1], step):
        index = slice(first, min(first + step, frames.shape[1]))
        yield index, frames[:, index]


def add_product_(x: torch.Tensor, y: torch.Tensor, weight: torch.Tensor) -> None:
    """x += y @ weight.T in place; x (B, ..., C) contiguous within a batch entry."""
    if x.device.type == "cpu":  # rounded as the stock model does: fp32 on a CPU is bit-equal to it
        x += F.linear(y, weight)
        return
    for x_b, y_b in zip(x, y, strict=True):  # in the product's epilogue
        x_b.view(-1, x.shape[-1]).addmm_(y_b.reshape(-1, y.shape[-1]), weight.t())


def head_norms(attn: Any) -> HeadNorms:
    """The head norms of a stock attention, Q's with its scale in it."""
    assert attn.norm_q.eps == attn.norm_k.eps
    gains = torch.stack((attn.norm_q.weight.float() * attn.scale, attn.norm_k.weight.float()))
    return HeadNorms(gains, attn.norm_q.eps)


def rotary_of(attn: Any, grid: Size, device: torch.device) -> Rotary:
    """The stock model's own frequencies at every position of the whole grid."""
    frequencies = [attn.rope._inv_freqs(dim, device) for dim in attn.rope.rope_dim_split]
    return rotary_table(frequencies, grid)
