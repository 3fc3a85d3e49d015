"""What the user chooses about the video decode. Plain data: read before torch is imported."""

from dataclasses import dataclass

METHODS = ("exact", "tiled", "conv")


@dataclass(frozen=True)
class DecodeOptions:
    """How latents become frames.

    `method`: "exact", the untiled decode; "tiled", the stock overlapping tiles, blended; "conv", the autoencoder's own
    decoder. `parallel` spreads exact and tiled over the ranks that share a video. `streaming` decodes in chunks, of
    `chunk_frames` video frames (a multiple of 8) or of what the free memory allows.
    """

    method: str = "exact"
    parallel: bool = False
    streaming: bool = False
    chunk_frames: int | None = None
