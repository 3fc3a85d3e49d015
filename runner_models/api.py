"""What the runner and a model say to each other."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from PIL import Image


class SetupError(ValueError):
    """What was asked cannot be set up here; the message says what to do. Raised before any weight is read."""


@dataclass(frozen=True)
class VideoRequest:
    """One video to make. Sizes in pixels and frames; `image` is RGB, exactly `width` x `height`, or None for t2v."""

    prompt: str
    negative_prompt: str
    image: Image.Image | None
    height: int
    width: int
    num_frames: int
    frame_rate: float
    num_inference_steps: int
    guidance_scale: float
    max_sequence_length: int
    seed: int


@dataclass(frozen=True)
class VideoOutput:
    """A video on the CPU: `frames` in order, in pieces (n, H, W, 3) uint8; `audio` (channels, samples) fp32 in [-1, 1].

    The pieces come as they are decoded, while `frames` is read: once, to the end, before the next request. Ranks that
    decode together wait for the one that reads.
    """

    frames: Iterable[torch.Tensor]
    audio: torch.Tensor
    audio_sample_rate: int

    def all_frames(self) -> torch.Tensor:
        """Read `frames` to the end: (F, H, W, 3) uint8."""
        return torch.cat(list(self.frames))


StageTimer = Callable[[str], AbstractContextManager[None]]
"""`with timer("stage1"):` times one stage; the clock may synchronise the device on both sides."""


class VideoModel(Protocol):
    """A loaded model. `stages` are the names it passes to the timer, in order."""

    stages: tuple[str, ...]

    def generate(self, request: VideoRequest, *, timer: StageTimer, progress: bool) -> VideoOutput | None:
        """Make one video; every rank of a replica calls it with the same request, its leader alone gets the output.

        `progress` shows bars on stderr. The seed is the request's; nothing is kept from one request to the next.
        """
        ...

    def prepare(self, request: VideoRequest) -> None:
        """Measure, on the sizes of this request, what the run chooses by measurement; every rank calls it."""
        ...

    def finish(self) -> None:
        """Log what only the end of a run knows and add it to `describe`; every rank calls it, once."""
        ...

    def compile(self, request: VideoRequest) -> float:
        """torch.compile what pays for the shapes of this request; the seconds it took."""
        ...

    def describe(self) -> dict[str, Any]:
        """What was loaded and chosen: revision, dtype, attention backends. JSON types only."""
        ...
