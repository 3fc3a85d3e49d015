"""From final frames to the host of the rank that saves them, while later frames are decoded.

Layouts: (B, n, H, W, 3) uint8 in, (n, H, W, 3) out.
"""

from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from runner_models.ltx2.decoder.halo import Shard

_TAG = 1  # the halos' transfers between the same ranks have tag 0


def host_frames(pieces: Iterator[torch.Tensor], shard: Shard | None) -> Iterator[torch.Tensor]:
    """On the first rank of the shard's group (or without one) whole frames, on the others nothing.

    Every rank must go through it to the end. On a GPU a piece is given when the next one has been launched.
    """
    if shard is not None and shard.rank:
        yield from _send(pieces, shard)
        return
    copies = _HostCopies()
    for own in pieces:
        with copies.stream(own):
            copies.add(_collect(own, shard))
        del own
        yield from copies.ready(keep=1)
    yield from copies.ready(keep=0)


def _send(pieces: Iterator[torch.Tensor], shard: Shard) -> Iterator[torch.Tensor]:
    """Gives nothing; it is a generator like its counterpart."""
    under_way: list[tuple[Any, torch.Tensor]] = []
    for own in pieces:
        operation = dist.P2POp(dist.isend, own, shard.peer(0), shard.group, _TAG)
        for work, _ in under_way:
            work.wait()
        under_way = [(work, own) for work in dist.batch_isend_irecv([operation])]
    for work, _ in under_way:
        work.wait()
    yield from ()


def _collect(own: torch.Tensor, shard: Shard | None) -> torch.Tensor:
    """Every rank's part of these frames, put together: (B, n, H, W, 3)."""
    if shard is None:
        return own
    dim = 1 + shard.axis
    per_cell = own.shape[dim] // (shard.own[1] - shard.own[0])
    parts, operations = [own], []
    for rank, (begin, end) in enumerate(shard.bounds[1:], 1):
        shape = [*own.shape]
        shape[dim] = (end - begin) * per_cell
        parts.append(own.new_empty(shape))
        operations.append(dist.P2POp(dist.irecv, parts[-1], shard.peer(rank), shard.group, _TAG))
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    return torch.cat(parts, dim=dim)


class _HostCopies:
    """Copies to pinned memory on a stream of their own; on a CPU, nothing but a queue."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[torch.Tensor, Any]] = deque()
        self._stream: Any = None

    def stream(self, own: torch.Tensor) -> Any:
        """A context in which frames are collected and copied, after `own` is computed."""
        if own.device.type != "cuda":
            return torch.cuda.stream(None)
        if self._stream is None:
            self._stream = torch.cuda.Stream(own.device)
        self._stream.wait_stream(torch.cuda.current_stream(own.device))
        own.record_stream(self._stream)
        return torch.cuda.stream(self._stream)

    def add(self, frames: torch.Tensor) -> None:
        """Start the copy of (1, n, H, W, 3) frames."""
        if frames.device.type != "cuda":
            self._waiting.append((frames[0], None))
            return
        host = torch.empty(frames.shape[1:], dtype=frames.dtype, pin_memory=True)
        host.copy_(frames[0], non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        self._waiting.append((host, event))

    def ready(self, *, keep: int) -> Iterator[torch.Tensor]:
        """All but the last `keep` copies, once they are done; without a GPU, all."""
        while self._waiting and (len(self._waiting) > keep or self._waiting[0][1] is None):
            host, event = self._waiting.popleft()
            if event is not None:
                event.synchronize()
            yield host
