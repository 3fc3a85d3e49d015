"""What the blocks keep between calls: frames in order, dropped from the front. Layout (B, F, ...)."""

import torch


class FrameBuffer:
    """Frames [first, first + count) of one stage, in one tensor.

    The storage holds no more than these frames: what is dropped is freed. Data is None while it is empty.
    """

    def __init__(self) -> None:
        self.first = 0
        self.data: torch.Tensor | None = None

    @property
    def count(self) -> int:
        """Frames held."""
        return 0 if self.data is None else self.data.shape[1]

    @property
    def end(self) -> int:
        """The frame after the last one held."""
        return self.first + self.count

    def append(self, frames: torch.Tensor) -> None:
        """Hold these frames too; an empty buffer takes over the tensor itself, without a copy."""
        if self.data is None:
            self.data = frames
        else:
            self.data = torch.cat([self.data, frames], dim=1)

    def extend(self, shape: torch.Size | tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
        """Room for new frames of `shape` (B, n, ...), in the dtype and device of `like`: a view to be written."""
        kept = self.count
        grown = like.new_empty((shape[0], kept + shape[1], *shape[2:]))
        if self.data is not None:
            grown[:, :kept] = self.data
        self.data = grown
        return grown[:, kept:]

    def view(self, first: int, count: int) -> torch.Tensor:
        """Frames [first, first + count), not copied."""
        assert self.data is not None
        return self.data.narrow(1, first - self.first, count)

    def take(self, count: int) -> torch.Tensor:
        """The first `count` frames, which leave the buffer."""
        assert self.data is not None
        taken = self.data.narrow(1, 0, count)
        self.drop_before(self.first + count)
        return taken

    def drop_before(self, frame: int) -> None:
        """Let go of the frames before `frame`."""
        gone = frame - self.first
        if gone <= 0:
            return
        assert self.data is not None
        self.data = self.data[:, gone:].clone() if gone < self.data.shape[1] else None
        self.first = frame
