"""Where frames and rows lie in the decoder: grids of the stages, caps, finished queries, shards and halos.

Integers alone, no tensors. Frames and rows are cells of a stage's token grid unless said otherwise.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from layers.neighborhood_attention.geometry import window_start

Span = tuple[int, int]
"""[begin, end) on one axis."""


@dataclass(frozen=True)
class Stage:
    """The token grid (frames, rows, columns) of one stage, ghost frames included where the stage has them.

    `scale` is cells per latent cell and axis; along time it counts before the causal drop of leading frames.
    """

    depth: int
    channels: int
    kernel: tuple[int, int, int]
    grid: tuple[int, int, int]
    scale: tuple[int, int, int]

    def cap(self, chunk_frames: int, last_scale: int) -> int:
        """Frames that a block of this stage takes in one call, for chunks of `chunk_frames` of the last stage."""
        return chunk_frames * self.scale[0] // last_scale


def ghost_latents(config: Mapping[str, Any]) -> int:
    """Copies of the last latent frame that go through stages 1 to 4 and are cropped before stage 5."""
    return int(config["decoder_stage_kernels"][0][0]) // 2 * 2


def stages_of(config: Mapping[str, Any], latent_grid: Sequence[int]) -> tuple[Stage, ...]:
    """The five stages of a decoder with this config, for latents of (frames, rows, columns).

    Raises:
        ValueError: a grid smaller than the window of a stage.
    """
    kernels = [*config["decoder_stage_kernels"], config["decoder_stage5_kernel"]]
    ghosts = ghost_latents(config)
    frames, rows, columns = latent_grid[0] + ghosts, latent_grid[1], latent_grid[2]
    scale = (1, 1, 1)
    stages = []
    for index, (depth, channels) in enumerate(
        zip(config["decoder_stage_depths"], config["decoder_stage_channels"], strict=True)
    ):
        kernel = tuple(int(k) for k in kernels[index])
        if index == len(kernels) - 1:
            frames -= ghosts * config["temporal_compression_ratio"]
        grid = (frames, rows, columns)
        if any(cells < k for cells, k in zip(grid, kernel, strict=True)):
            raise ValueError(
                f"latents of {'x'.join(map(str, latent_grid))} cells give stage {index + 1} a grid of "
                f"{'x'.join(map(str, grid))}, smaller than its window {'x'.join(map(str, kernel))}"
            )
        stages.append(Stage(int(depth), int(channels), (kernel[0], kernel[1], kernel[2]), grid, scale))
        if index < len(kernels) - 1:
            t, h, w = config["decoder_upsample_strides"][index]
            frames, rows, columns = frames * t - (t == 2), rows * h, columns * w
            scale = (scale[0] * t, scale[1] * h, scale[2] * w)
    return tuple(stages)


@dataclass
class Window:
    """How far one attention has come along time: `received` frames in order, of which `finished` have left it."""

    length: int
    kernel: int
    received: int = 0
    finished: int = 0

    def receive(self, count: int) -> None:
        """Note `count` more frames."""
        self.received += count
        assert self.received <= self.length

    def finish(self, count: int) -> None:
        """Note that the next `count` queries were answered."""
        assert 0 < count <= self.ready
        self.finished += count

    @property
    def ready(self) -> int:
        """Queries that can be answered: those whose whole window [start(p), start(p) + kernel) was received."""
        if self.received == self.length:
            return self.length - self.finished
        if self.received < self.kernel:
            return 0
        return self.received - self.kernel + self.kernel // 2 + 1 - self.finished

    @property
    def first_key(self) -> int:
        """The first frame that an unfinished query sees; what lies before it is not needed any more."""
        if self.finished == self.length:
            return self.length
        return window_start(self.finished, self.kernel, self.length)


def split_rows(rows: int, parts: int) -> tuple[Span, ...]:
    """[begin, end) of each part, as even as whole rows allow, longer parts first.

    Raises:
        ValueError: more parts than rows.
    """
    if parts > rows:
        raise ValueError(f"{rows} latent rows cannot be shared by {parts} ranks; at most one rank a row")
    sizes = [rows // parts + (part < rows % parts) for part in range(parts)]
    return tuple((sum(sizes[:part]), sum(sizes[: part + 1])) for part in range(parts))


@dataclass(frozen=True)
class Halo:
    """What one rank owns, needs, sends and receives on the sharded axis of one attention, in rows of the whole grid.

    `needed` contains `own`. `interior` are the queries whose windows lie within `own`; it may be empty.
    """

    own: Span
    needed: Span
    interior: Span
    sends: tuple[tuple[int, Span], ...] = ()
    receives: tuple[tuple[int, Span], ...] = ()


def halo(bounds: Sequence[Span], rank: int, *, kernel: int, length: int) -> Halo:
    """The halo of `rank` where rank r owns the rows bounds[r] of an axis of `length` rows."""

    def needed(own: Span) -> Span:
        return window_start(own[0], kernel, length), window_start(own[1] - 1, kernel, length) + kernel

    def overlap(a: Span, b: Span) -> Span:
        return max(a[0], b[0]), min(a[1], b[1])

    own, mine = bounds[rank], needed(bounds[rank])
    peers = [peer for peer in range(len(bounds)) if peer != rank]
    sends = [(peer, overlap(needed(bounds[peer]), own)) for peer in peers]
    receives = [(peer, overlap(mine, bounds[peer])) for peer in peers]
    inside = [
        row
        for row in range(*own)
        if own[0] <= window_start(row, kernel, length) and window_start(row, kernel, length) + kernel <= own[1]
    ]
    return Halo(
        own,
        mine,
        (inside[0], inside[-1] + 1) if inside else (own[0], own[0]),
        tuple((peer, span) for peer, span in sends if span[0] < span[1]),
        tuple((peer, span) for peer, span in receives if span[0] < span[1]),
    )
