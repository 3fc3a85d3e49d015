"""One neighborhood-attention block of the decoder as a stateful node, on the weights of a stock block.

The arithmetic is that of LTX2VideoVaeNABlock and LTX2VideoVaeDiffusionNABlock (diffusers 0.42,
models/autoencoders/ltx2_diffusion_decoder.py). What differs: a block sees a part of the frames and of the rows, and
works in place on its input, in slices of frames. Layout (B, T, H, W, C), and (..., heads, head_dim) for attention.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from layers.neighborhood_attention.backend import NeighborhoodAttention
from runner_models.ltx2.decoder.buffers import FrameBuffer
from runner_models.ltx2.decoder.flow import WindowNode
from runner_models.ltx2.decoder.geometry import Stage, Window
from runner_models.ltx2.decoder.halo import KeyValues, Shard
from runner_models.ltx2.qkv import project as project_qkv


@dataclass(frozen=True)
class Modulation:
    """Scale (1 added) and shift of both norms of a diffusion block at one timestep, each (B, 1, 1, 1, C)."""

    attn_scale: torch.Tensor
    attn_shift: torch.Tensor
    mlp_scale: torch.Tensor
    mlp_shift: torch.Tensor


class Context:
    """The latent context of stage 5, which every diffusion block of every step reads; kept until the last has."""

    def __init__(self) -> None:
        self.frames = FrameBuffer()


class Block(WindowNode[torch.Tensor]):
    """A block of stages 1 to 4 (`context` None) or of stage 5.

    It keeps K and V of the frames that unfinished queries see, and those queries with their residuals.
    """

    def __init__(
        self,
        stock: Any,
        stage: Stage,
        cap: int,
        *,
        attention: NeighborhoodAttention,
        shard: Shard | None = None,
        context: Context | None = None,
        modulation: Modulation | None = None,
        last: bool = False,
    ) -> None:
        """`last`: no later block reads the context, so this one drops what it has read."""
        super().__init__(Window(stage.grid[0], stage.kernel[0]), cap)
        self.stock, self.stage, self.attention = stock, stage, attention
        self.context, self.modulation, self.last = context, modulation, last
        self.axis = shard.axis if shard else None
        self.rows = None
        if shard is not None:
            axis = shard.axis
            self.rows = shard.halo(kernel=stage.kernel[axis], length=stage.grid[axis], scale=stage.scale[axis])
        self.queries, self.residual = FrameBuffer(), FrameBuffer()
        self.key_values = KeyValues(shard, self.rows)

    def take(self, frames: torch.Tensor) -> int:
        """Project Q, K, V of (B, n, H, W, C) frames and keep them as residuals; starts the halo exchange."""
        count, start = frames.shape[1], self.window.received
        attn = self.stock.attn
        shape = (*frames.shape[:-1], attn.heads, attn.head_dim)
        q = self.queries.extend(shape, frames)
        k, v = self.key_values.extend(shape, frames)
        first_row = self._at_axis(self.rows.own[0] if self.rows else 0)
        for index, x in frame_slices(frames):
            if self.context is not None:
                x += self.stock.context_proj(self.context.frames.view(start + index.start, x.shape[1]))
            x = self._norm1(x)
            starts = (start + index.start, *first_row[1:])
            project(attn, x, starts, out=(q[:, index], k[:, index], v[:, index]))
        self.residual.append(frames)
        self.key_values.exchange(count)
        if self.context is not None and self.last:
            self.context.frames.drop_before(start + count)
        return count

    def answer(self, count: int) -> torch.Tensor:
        """Attention and MLP of the next `count` queries: (B, count, H, W, C)."""
        attended = self._attend(count)
        self.window.finish(count)
        self.key_values.drop_before(self.window.first_key)
        frames = self.residual.take(count)
        for index, x in frame_slices(frames):
            x += self.stock.attn.to_out[0](attended[:, index].flatten(-2))
            x += swiglu(self.stock.mlp, self._norm2(x))
        return frames

    def _attend(self, count: int) -> torch.Tensor:
        """The interior first, if there is one: meanwhile the halo is on its way."""
        start = self.window.finished
        q = self.queries.take(count)
        rows = self.rows
        if rows is None or self.axis is None:
            return self._call(q, *self.key_values.whole(), start, 0, 0)
        (begin, end), (top, bottom) = rows.own, rows.interior
        if top == bottom or rows.own == rows.needed:
            return self._call(q, *self.key_values.whole(), start, begin, rows.needed[0])
        dim = 1 + self.axis
        parts = [self._call(q.narrow(dim, top - begin, bottom - top), *self.key_values.own(), start, top, begin)]
        k, v = self.key_values.whole()
        if begin < top:
            parts.insert(0, self._call(q.narrow(dim, 0, top - begin), k, v, start, begin, rows.needed[0]))
        if bottom < end:
            parts.append(self._call(q.narrow(dim, bottom - begin, end - bottom), k, v, start, bottom, rows.needed[0]))
        return torch.cat(parts, dim=dim)

    def _call(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, frame: int, q_row: int, kv_row: int
    ) -> torch.Tensor:
        """`frame` is the first query's; q_row and kv_row are the first rows of q and of k, v in the whole grid."""
        q_start, kv_start = self._at_axis(q_row), self._at_axis(kv_row)
        return self.attention(
            q,
            k,
            v,
            self.stage.kernel,
            q_start=(frame, *q_start[1:]),
            kv_start=(self.key_values.keys.first, *kv_start[1:]),
            grid=self.stage.grid,
        )

    def _at_axis(self, row: int) -> tuple[int, int, int]:
        return (0, row if self.axis == 1 else 0, row if self.axis == 2 else 0)

    def _norm1(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stock.norm1(x)
        return x if self.modulation is None else x.mul_(self.modulation.attn_scale).add_(self.modulation.attn_shift)

    def _norm2(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stock.norm2(x)
        return x if self.modulation is None else x.mul_(self.modulation.mlp_scale).add_(self.modulation.mlp_shift)


SLICE_TOKENS = {"cpu": 2**14, "accelerator": 2**17}
"""Tokens that go through the pointwise part at once; 2**17 are three temporaries of 256 MiB in stage 5's MLP."""


def frame_slices(frames: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor]]:
    """(B, T, H, W, ...) in slices of whole frames; each with its place on T."""
    tokens = frames.shape[0] * frames.shape[2] * frames.shape[3]
    step = max(1, SLICE_TOKENS["cpu" if frames.device.type == "cpu" else "accelerator"] // tokens)
    for first in range(0, frames.shape[1], step):
        index = slice(first, min(first + step, frames.shape[1]))
        yield index, frames[:, index]


def project(attn: Any, x: torch.Tensor, starts: tuple[int, ...], *, out: tuple[torch.Tensor, ...]) -> None:
    """Q (scaled), K, V of the normed x (B, T, H, W, C), whose first token lies at `starts` (T, H, W) of the whole grid,
    into three (B, T, H, W, heads, head_dim) tensors. The order is project_qkv's: norm, scale, rotate.
    """
    q, k, v = project_qkv(attn, x)
    out[2].copy_(v)
    rotate(attn.rope, attn.norm_q(q).mul_(attn.scale), starts, out=out[0])
    rotate(attn.rope, attn.norm_k(k), starts, out=out[1])


def rotate(rope: Any, x: torch.Tensor, starts: tuple[int, ...], *, out: torch.Tensor) -> None:
    """LTX2VideoVaeRotaryPosEmbed3D.forward for a part of the grid that begins at `starts` (T, H, W): the stock model's
    own fp32 angles, at the positions of the whole.
    """
    parts = []
    for axis, part in enumerate(x.split(rope.rope_dim_split, dim=-1)):
        first, count = starts[axis], x.shape[1 + axis]
        positions = torch.arange(first, first + count, dtype=torch.float32, device=x.device)
        frequencies = rope._inv_freqs(part.shape[-1], x.device)
        parts.append(rope._rotate_axis(part, positions, frequencies, axis=1 + axis))
    torch.cat(parts, dim=-1, out=out)


def swiglu(mlp: Any, x: torch.Tensor) -> torch.Tensor:
    """LTX2VideoVaeSwiGLU without its slices of 16,384 tokens."""
    return mlp.w_down(F.silu(mlp.w_gate(x)).mul_(mlp.w_up(x)))
