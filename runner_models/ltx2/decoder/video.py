"""Latents to finished frames on the host, as the user chose: method, ranks, chunks."""

import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import record_function

from layers.neighborhood_attention.backend import NeighborhoodAttention
from layers.parallel_state import ParallelState
from runner_models.ltx2.decoder.block import Block
from runner_models.ltx2.decoder.budget import choose_chunk, decode_bytes, free_bytes
from runner_models.ltx2.decoder.exact import ExactDecoder
from runner_models.ltx2.decoder.flow import Node
from runner_models.ltx2.decoder.geometry import Stage, ghost_latents, split_rows, stages_of
from runner_models.ltx2.decoder.halo import Shard
from runner_models.ltx2.decoder.options import DecodeOptions
from runner_models.ltx2.decoder.output import host_frames
from runner_models.ltx2.decoder.tiled import tiled_decode
from runner_models.ltx2.pixels import to_uint8

logger = logging.getLogger(__name__)
GIB = 2**30


class VideoDecoder:
    """The video decode of one loaded model."""

    def __init__(
        self, model: Any, vae: Any, *, attention: NeighborhoodAttention, options: DecodeOptions, state: ParallelState
    ) -> None:
        """`model` is the stock diffusion decoder, `vae` the stock autoencoder (for "conv")."""
        self.model, self.vae, self.options, self.state = model, vae, options, state
        self.exact = ExactDecoder(model, attention=attention)
        self._said: set[str] = set()
        self._last_chunk: int | None = None

    @property
    def parallel(self) -> bool:
        """Whether all ranks that share a video take part; else the first alone does."""
        return self.options.parallel and self.state.sequence_degree > 1 and self.options.method != "conv"

    def describe(self) -> dict[str, Any]:
        """JSON types; `chunk_frames` is that of the last exact decode, None for the whole clip at once."""
        ranks = self.state.sequence_degree if self.parallel else 1
        return {"method": self.options.method, "ranks": ranks, "chunk_frames": self._last_chunk}

    @torch.inference_mode()
    def frames(
        self, latents: torch.Tensor, generator: torch.Generator, *, bar: Any | None = None
    ) -> Iterator[torch.Tensor]:
        """(1, 128, T, h, w) denormalised latents -> (n, H, W, 3) uint8 on the host, in order, as they are finished.

        Frames come out on the first rank of the sequence group; the others get none, but where `parallel` each must go
        through the iterator to its end. `bar` is a tqdm of total 1.

        Raises:
            torch.OutOfMemoryError: saying what was needed and what would need less.
        """
        latents = latents.to(self.state.device, self.model.dtype)
        if self.options.method == "exact":
            yield from self._exact(latents, generator, bar)
            return
        if self.options.method == "tiled":
            video = tiled_decode(self.model, latents, generator=generator, state=self.state if self.parallel else None)
        else:
            video = self._conv(latents)
        if video is not None:
            yield to_uint8(video)[0].cpu()

    def _exact(self, latents: torch.Tensor, generator: torch.Generator, bar: Any | None) -> Iterator[torch.Tensor]:
        grid = (latents.shape[2], latents.shape[3], latents.shape[4])
        shard = None
        if self.parallel:
            axis = 2 if grid[2] > grid[1] else 1
            bounds = split_rows(grid[axis], self.state.sequence_degree)
            shard = Shard(axis, bounds, self.state.sequence_rank, self.state.sequence_group)
        chunk = self._last_chunk = self._chunk(grid)
        progress = _Progress(bar, stages_of(self.model.config, grid), self.model.decoder.default_num_inference_steps)
        try:
            pieces = self.exact.decode(
                latents, generator=generator, chunk_frames=chunk, shard=shard, as_bytes=True, watch=progress.watch
            )
            yield from host_frames(pieces, shard)
        except torch.OutOfMemoryError as error:
            raise torch.OutOfMemoryError(self._shortage(grid, chunk, error)) from error

    def _chunk(self, grid: tuple[int, int, int]) -> int | None:
        """The frames a chunk, the same on every rank; None for the whole clip."""
        options = self.options
        if options.chunk_frames is not None:
            return options.chunk_frames
        config = self.model.config
        whole = 8 * (grid[0] + ghost_latents(config))
        free = free_bytes(self.state.device)
        chunk = choose_chunk(
            config,
            grid,
            element=self.model.dtype.itemsize,
            free_bytes=free,
            streaming=options.streaming,
            ranks=self.state.sequence_degree if self.parallel else 1,
            steps=self.model.decoder.default_num_inference_steps,
        )
        if self.parallel:
            agreed = torch.tensor(chunk or whole, device=self.state.device)
            dist.all_reduce(agreed, op=dist.ReduceOp.MIN, group=self.state.sequence_group)
            chunk = int(agreed)
            chunk = None if chunk == whole else chunk
        if chunk is not None:
            why = "asked for" if options.streaming else "the whole clip does not fit"
            self._say(
                f"video decode: in chunks of {chunk} frames ({why}; {free / GIB:.1f} GiB free, about "
                f"{self._needed(grid, chunk) / GIB:.1f} GiB needed, {self._needed(grid, None) / GIB:.1f} GiB at once)"
            )
        return chunk

    def _needed(self, grid: tuple[int, int, int], chunk: int | None, *, ranks: int | None = None) -> int:
        return decode_bytes(
            self.model.config,
            grid,
            element=self.model.dtype.itemsize,
            chunk_frames=chunk,
            ranks=ranks or (self.state.sequence_degree if self.parallel else 1),
            steps=self.model.decoder.default_num_inference_steps,
        )

    def _shortage(self, grid: tuple[int, int, int], chunk: int | None, error: BaseException) -> str:
        ranks = self.state.sequence_degree if self.parallel else 1
        longer = max(grid[1:])
        remedies = []
        if chunk is None or chunk > 8:
            remedies.append(f"--decode_chunk_frames 8 needs about {self._needed(grid, 8) / GIB:.1f} GiB")
        if 2 * ranks <= longer:
            more = self._needed(grid, chunk, ranks=2 * ranks)
            remedies.append(f"--use_parallel_vae on {2 * ranks} ranks about {more / GIB:.1f} GiB each")
        how = "at once" if chunk is None else f"in chunks of {chunk} frames"
        return (
            f"the video decode {how} needs about {self._needed(grid, chunk) / GIB:.1f} GiB beside the weights and did "
            f"not get it; {', '.join(remedies) or 'use a smaller size'}. ({error})"
        )

    def _conv(self, latents: torch.Tensor) -> torch.Tensor:
        """The autoencoder's decoder, as LTX2Pipeline calls it."""
        if self.options.streaming:
            self.vae.enable_tiling()
        latents = latents.to(self.vae.dtype)
        timestep = None
        if self.vae.config.timestep_conditioning:
            timestep = torch.zeros(1, device=latents.device, dtype=latents.dtype)
        return self.vae.decode(latents, timestep, return_dict=False)[0]

    def _say(self, line: str) -> None:
        if line not in self._said:
            self._said.add(line)
            logger.info(line)


class _Progress:
    """Moves a bar by the share of the tokens times channels that went through a block; on a GPU, were launched."""

    def __init__(self, bar: Any | None, stages: tuple[Stage, ...], steps: int) -> None:
        self.bar = bar
        self._done: dict[int, int] = {}
        weights = [stage.depth * math.prod(stage.grid) * stage.channels for stage in stages]
        self._total = sum(weights) + (steps - 1) * weights[-1]
        self._names = {stage: f"decoder stage {index}" for index, stage in enumerate(stages, 1)}

    @contextmanager
    def watch(self, node: Node[torch.Tensor]) -> Iterator[None]:
        """Enter around a piece of work; see flow.drive. Names it in a trace."""
        with record_function(self._names[node.stage] if isinstance(node, Block) else f"decoder {type(node).__name__}"):
            yield
        if self.bar is None or not isinstance(node, Block):
            return
        new = node.window.finished - self._done.get(id(node), 0)
        self._done[id(node)] = node.window.finished
        _, rows, columns = node.stage.grid
        self.bar.update(new * rows * columns * node.stage.channels / self._total)
