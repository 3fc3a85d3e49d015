"""What bench_e2e.py asks of another runner."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from peers.work import NestedClock


@dataclass(frozen=True)
class Made:
    """A finished request as the peer gives it: `frames` (F, H, W, 3) in [0, 1], `audio` (channels, samples)."""

    frames: np.ndarray
    audio: torch.Tensor
    audio_sample_rate: int
    raw: Any = None

    def bytes(self) -> torch.Tensor:
        """(F, H, W, 3) uint8."""
        return torch.from_numpy((self.frames * 255).round().astype(np.uint8))


class Peer(Protocol):
    """Another runner over the bench's weights. Every rank calls each method."""

    transformer: Any
    decoder: Any
    compile_seconds: float | None

    def generate(self, clock: NestedClock) -> Made:
        """One request; on every rank."""
        ...

    def save(self, made: Made, directory: Path) -> Path | None:
        """Write the video on the rank that does so there; its path, None elsewhere."""
        ...

    def latents(self) -> torch.Tensor:
        """Those that the last request's decode got."""
        ...

    def describe(self) -> dict[str, Any]:
        """JSON types."""
        ...

    def close(self) -> None:
        """Give up what only this peer holds."""
        ...
