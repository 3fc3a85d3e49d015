"""One neighborhood-attention block of the decoder as a stateful node, on the weights of a stock block.

The arithmetic is that of LTX2VideoVaeNABlock and LTX2VideoVaeDiffusionNABlock (diffusers 0.42,
models/autoencoders/ltx2_diffusion_decoder.py). What differs: a block sees a part of the frames and of the rows, and
works in place on its input; what it does to tokens alone is in pointwise.py. Layout (B, T, H, W, C), and
(..., heads, head_dim) for attention.
"""

from typing import Any

import torch

from layers.neighborhood_attention.backend import NeighborhoodAttention
from runner_models.ltx2.decoder.buffers import FrameBuffer
from runner_models.ltx2.decoder.flow import WindowNode
from runner_models.ltx2.decoder.geometry import Stage, Window
from runner_models.ltx2.decoder.halo import KeyValues, Shard
from runner_models.ltx2.decoder.pointwise import Modulation, Pointwise, pointwise


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
        softmax_bound: float | None = None,
        last: bool = False,
    ) -> None:
        """`softmax_bound`: no score is larger, see na3d_flash_attn; None where the attention asks for none. `last`: no
        later block reads the context, so this one drops what it has read."""
        super().__init__(Window(stage.grid[0], stage.kernel[0]), cap)
        self.stock, self.stage, self.attention = stock, stage, attention
        self.context, self.modulation, self.last = context, modulation, last
        self.bound = {} if softmax_bound is None else {"softmax_bound": softmax_bound}
        self._pointwise: Pointwise | None = None
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
        out = (self.queries.extend(shape, frames), *self.key_values.extend(shape, frames))
        context = None if self.context is None else self.context.frames.view(start, count)
        if self._pointwise is None:
            self._pointwise = pointwise(self.stock, self.modulation, self.stage.grid, frames)
        first_row = self._at_axis(self.rows.own[0] if self.rows else 0)
        self._pointwise.project(frames, context, (start, *first_row[1:]), out)
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
        assert self._pointwise is not None
        self._pointwise.finish(frames, attended)
        return frames

    def _attend(self, count: int) -> torch.Tensor:
        """The interior first, if there is one: meanwhile the halo is on its way."""
        start = self.window.finished
        q = self.queries.take(count)
        rows = self.rows
        if rows is None or self.axis is None:
            return self._call(q, *self.key_values.whole(), start, 0, 0)
        (begin, end), (top, bottom) = rows.own, rows.interior
        # The kernels take this many rows or columns at once: the border keeps whole ones, else it fills half a tile.
        tile = 4 if self.axis == 1 else 8
        top = begin - (begin - top) // tile * tile
        bottom = bottom if bottom == end else begin + (bottom - begin) // tile * tile
        if top >= bottom or rows.own == rows.needed:
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
            **self.bound,
        )

    def _at_axis(self, row: int) -> tuple[int, int, int]:
        return (0, row if self.axis == 1 else 0, row if self.axis == 2 else 0)
