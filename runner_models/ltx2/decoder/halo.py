"""Keys and values of one attention, with the rows that other ranks own.

Each push sends and receives the rows of its new frames only, point to point with the ranks that own them. The transfer
starts when the rows are written and is waited for by the first reader that needs more than this rank's own rows.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist

from runner_models.ltx2.decoder.buffers import FrameBuffer
from runner_models.ltx2.decoder.geometry import Halo, Span, halo


@dataclass(frozen=True)
class Shard:
    """This rank's part of the sharded axis: rank r of `group` owns the latent rows bounds[r].

    `axis` is 1 for rows (H) and 2 for columns (W) of (T, H, W); what is said of rows holds for columns too.
    """

    axis: int
    bounds: tuple[Span, ...]
    rank: int
    group: dist.ProcessGroup | None

    @property
    def own(self) -> Span:
        """This rank's latent rows."""
        return self.bounds[self.rank]

    def scaled(self, scale: int) -> tuple[Span, ...]:
        """The bounds in cells of a grid with `scale` cells per latent row."""
        return tuple((begin * scale, end * scale) for begin, end in self.bounds)

    def peer(self, rank: int) -> int:
        """The global rank of rank `rank` of the group."""
        assert self.group is not None
        return dist.get_global_rank(self.group, rank)

    def halo(self, *, kernel: int, length: int, scale: int) -> Halo:
        """The halo of an attention whose grid has `length` rows, `scale` per latent row."""
        return halo(self.scaled(scale), self.rank, kernel=kernel, length=length)


class KeyValues:
    """K and V of the frames that unfinished queries see, (B, T, H, W, heads, head_dim), own rows and halo."""

    def __init__(self, shard: Shard | None, rows: Halo | None) -> None:
        assert (shard is None) == (rows is None)
        self.shard, self.rows = shard, rows
        self.keys, self.values = FrameBuffer(), FrameBuffer()
        self._transfer: _Transfer | None = None

    def extend(self, shape: torch.Size | tuple[int, ...], like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Room for K and V of new frames of this rank's own rows, `shape` (B, n, H, W, heads, head_dim); write both,
        then call `exchange`.
        """
        self._finish_transfer()
        if self.shard is None or self.rows is None:
            return self.keys.extend(shape, like), self.values.extend(shape, like)
        dim = 1 + self.shard.axis
        needed, own = self.rows.needed, self.rows.own
        shape = (*shape[:dim], needed[1] - needed[0], *shape[dim + 1 :])
        whole = (self.keys.extend(shape, like), self.values.extend(shape, like))
        k, v = (x.narrow(dim, own[0] - needed[0], own[1] - own[0]) for x in whole)
        return k, v

    def exchange(self, count: int) -> None:
        """Start the exchange of the rows of the last `count` frames. Every rank of the group calls it."""
        if self.shard is None or self.rows is None or not (self.rows.sends or self.rows.receives):
            return
        new = [buffer.view(buffer.end - count, count) for buffer in (self.keys, self.values)]
        self._transfer = _Transfer(self.shard, self.rows, new)

    def own(self) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of this rank's rows; there is no need to wait for the others."""
        assert self.keys.data is not None
        assert self.values.data is not None
        if self.shard is None or self.rows is None:
            return self.keys.data, self.values.data
        dim, start = 1 + self.shard.axis, self.rows.own[0] - self.rows.needed[0]
        length = self.rows.own[1] - self.rows.own[0]
        return self.keys.data.narrow(dim, start, length), self.values.data.narrow(dim, start, length)

    def whole(self) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of all needed rows, once they have come."""
        self._finish_transfer()
        assert self.keys.data is not None
        assert self.values.data is not None
        return self.keys.data, self.values.data

    def drop_before(self, frame: int) -> None:
        """Let go of the frames before `frame`."""
        self._finish_transfer()
        self.keys.drop_before(frame)
        self.values.drop_before(frame)

    def _finish_transfer(self) -> None:
        if self._transfer is not None:
            self._transfer.finish()
            self._transfer = None


class _Transfer:
    """One exchange under way; holds what is sent and received until it is done."""

    def __init__(self, shard: Shard, rows: Halo, new: list[torch.Tensor]) -> None:
        dim, base = 1 + shard.axis, rows.needed[0]

        def part(x: torch.Tensor, span: Span) -> torch.Tensor:
            return x.narrow(dim, span[0] - base, span[1] - span[0])

        sends = [(peer, torch.stack([part(x, span) for x in new])) for peer, span in rows.sends]
        self._received = []
        for peer, span in rows.receives:
            places = [part(x, span) for x in new]
            self._received.append((peer, places, new[0].new_empty((2, *places[0].shape))))
        operations = [dist.P2POp(dist.isend, x, shard.peer(peer), shard.group) for peer, x in sends]
        operations += [dist.P2POp(dist.irecv, x, shard.peer(peer), shard.group) for peer, _, x in self._received]
        self._sent = [x for _, x in sends]
        self._works = dist.batch_isend_irecv(operations)

    def finish(self) -> None:
        """Wait (on a GPU: let what is queued next wait) and put the rows in their places."""
        for work in self._works:
            work.wait()
        for _, places, staged in self._received:
            for place, x in zip(places, staged, strict=True):
                place.copy_(x)
