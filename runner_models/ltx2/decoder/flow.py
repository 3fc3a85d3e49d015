"""How frames move through the decoder: depth-first, never more than a node's cap at a time.

A node takes frames in order and gives those that are final; what it gives goes through all nodes below before the next
call. So device memory is bounded by the nodes' states and one call each, also when the end of the clip releases many
frames at once.
"""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Generic, Protocol, TypeVar

import torch

from runner_models.ltx2.decoder.geometry import Window

Frames = TypeVar("Frames")

Watch = Callable[["Node[Any]"], AbstractContextManager[None]]
"""Entered around each piece of a node's work, for clocks."""


class Node(Protocol[Frames]):
    """A stateful step of the decoder. `cap` is the most frames that one call may bring."""

    cap: int

    def push(self, frames: Frames) -> Iterator[Frames]:
        """Take frames that follow the last ones; give those that are final, in order, in pieces of any length."""
        ...


class WindowNode(ABC, Generic[Frames]):
    """A node with a window along time; subclasses hold the frames.

    It owns what is pushed into it, and lets go of it before it gives anything away: a suspended node must not keep
    frames alive while those below work.
    """

    def __init__(self, window: Window, cap: int) -> None:
        self.window = window
        self.cap = cap

    @abstractmethod
    def take(self, frames: Frames) -> int:
        """Keep what the windows need of new frames; how many there were."""

    @abstractmethod
    def answer(self, count: int) -> Frames:
        """The next `count` finished frames; calls window.finish and drops what no query needs any more."""

    def push(self, frames: Frames) -> Iterator[Frames]:
        """See Node; every piece has at most `cap` frames."""
        self.window.receive(self.take(frames))
        del frames
        while count := min(self.window.ready, self.cap):
            yield self.answer(count)


def split_frames(frames: torch.Tensor, cap: int) -> Iterator[torch.Tensor]:
    """Pieces of at most `cap` frames of (B, F, ...); each is let go of as it is given away."""
    pieces = deque(frames.split(cap, dim=1))
    del frames
    while pieces:
        yield pieces.popleft()


def drive(
    nodes: Sequence[Node[Frames]],
    source: Iterable[Frames],
    *,
    split: Callable[[Frames, int], Iterator[Frames]],
    watch: Watch = lambda node: nullcontext(),
) -> Iterator[Frames]:
    """Push every piece of `source` through all nodes, depth-first; what leaves the last one."""
    # Not recursive, and no name keeps a piece while the nodes below work on it. Entries: pieces for node `index`,
    # straight from the node above or already cut to size.
    waiting: list[tuple[Iterator[Frames], int, bool]] = [(iter(source), 0, False)]
    while waiting:
        pieces, index, cut = waiting[-1]
        with nullcontext() if cut or index == 0 else watch(nodes[index - 1]):
            piece = next(pieces, None)
        if piece is None:
            waiting.pop()
        elif index == len(nodes):
            yield piece
        elif cut:
            waiting.append((nodes[index].push(piece), index + 1, False))
        else:
            waiting.append((split(piece, nodes[index].cap), index, True))
        del pieces, piece
