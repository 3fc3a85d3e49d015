"""The stock decode in overlapping tiles, blended, as other runners do it; kept to compare with.

Whole tiles go to the ranks, longest first; the first rank stitches. The tiles, their noise and the blending are those
of LTX2VideoDiffusionDecoderModel.tiled_decode, which runs twice: once to list the tiles, once to stitch them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from layers.parallel_state import ParallelState
from runner_models.ltx2.decoder.exact import prepare_offloaded


@dataclass
class _Tile:
    """A tile's features entering stage 4, with the stock arguments, and its noise; `shape` is (B, T, H, W, C)."""

    features: torch.Tensor
    options: dict[str, bool]
    shape: tuple[int, ...]
    noise: torch.Tensor | None = None


@dataclass
class _Lister:
    """Stands in for the stock decoder: lists tiles instead of decoding them."""

    decoder: Any
    features: torch.Tensor | None = None
    tiles: list[_Tile] = field(default_factory=list)
    results: list[torch.Tensor] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.decoder, name)

    def forward_stages_1_to_3(self, latents: torch.Tensor) -> torch.Tensor:
        if self.features is None:
            self.features = self.decoder.forward_stages_1_to_3(latents)
        return self.features

    def forward_stage_4(self, features: torch.Tensor, **options: bool) -> _Tile:
        upsample = self.decoder.upsamples[-1]
        batch, frames, rows, columns, _ = features.shape
        t, h, w = upsample.stride
        frames = frames * t - (t == 2 and options["drop_leading_frame"])
        if options["crop_trailing_ghost"]:
            frames -= self.decoder.trailing_pad_latent_frames * self.decoder.temporal_compression_ratio
        return _Tile(features, options, (batch, frames, rows * h, columns * w, upsample.out_channels))

    def denoise(self, tile: _Tile, noise: torch.Tensor, steps: int) -> torch.Tensor:
        if self.results is not None:
            return self.results.pop(0)
        tile.noise = noise
        self.tiles.append(tile)
        return noise.to("meta")  # blending costs nothing there


@torch.inference_mode()
def tiled_decode(
    model: Any, latents: torch.Tensor, *, generator: torch.Generator, state: ParallelState | None = None
) -> torch.Tensor | None:
    """Decode (B, 128, T, h, w) in the model's tiles: (B, 3, F, H, W) pixels, on the first of `state`'s ranks alone.

    Every rank of the sequence group calls it with the same arguments; state None is one rank.
    """
    model.enable_tiling()
    if state is None or state.sequence_degree == 1:
        return model.decode(latents, generator=generator, return_dict=False)[0]
    prepare_offloaded(model)
    steps = model.decoder.default_num_inference_steps
    lister = _Lister(model.decoder)
    before = generator.get_state()
    _stock_tiled_decode(model, lister, latents, generator)
    owners = assign([torch.Size(tile.shape).numel() for tile in lister.tiles], state.sequence_degree)
    done = {}
    for index, tile in enumerate(lister.tiles):
        if owners[index] == state.sequence_rank:
            context = model.decoder.forward_stage_4(tile.features, **tile.options)
            done[index] = model.decoder.denoise(context, tile.noise, steps).contiguous()
    results = _gather(done, lister.tiles, owners, state)
    if results is None:
        return None
    lister.results = results
    again = torch.Generator(generator.device)
    again.set_state(before)
    return _stock_tiled_decode(model, lister, latents, again)


def assign(costs: Sequence[int], ranks: int) -> list[int]:
    """The rank of each tile: longest first, each to the rank with the least work so far."""
    loads = [0] * ranks
    owners = [0] * len(costs)
    for index in sorted(range(len(costs)), key=lambda i: -costs[i]):
        owners[index] = loads.index(min(loads))
        loads[owners[index]] += costs[index]
    return owners


def _stock_tiled_decode(model: Any, decoder: _Lister, latents: torch.Tensor, generator: torch.Generator) -> Any:
    class Stand:
        """The model, with another decoder."""

        def __getattr__(self, name: str) -> Any:
            return decoder if name == "decoder" else getattr(model, name)

    return type(model).tiled_decode(Stand(), latents, generator=generator)


def _gather(
    done: dict[int, torch.Tensor], tiles: list[_Tile], owners: list[int], state: ParallelState
) -> list[torch.Tensor] | None:
    """All tiles on the first rank, point to point; None elsewhere."""
    group = state.sequence_group
    assert group is not None
    operations = []
    for index, owner in enumerate(owners):
        if owner == 0:
            continue
        if state.sequence_rank == owner:
            operations.append(dist.P2POp(dist.isend, done[index], dist.get_global_rank(group, 0), group))
        elif state.sequence_rank == 0:
            noise = tiles[index].noise
            assert noise is not None
            done[index] = torch.empty_like(noise, memory_format=torch.contiguous_format)
            operations.append(dist.P2POp(dist.irecv, done[index], dist.get_global_rank(group, owner), group))
    for work in dist.batch_isend_irecv(operations) if operations else []:
        work.wait()
    return [done[index] for index in range(len(tiles))] if state.sequence_rank == 0 else None
