"""The exact decode: latents to final frames, whole or in chunks, on one rank or on a shard of every rank.

    decoder = ExactDecoder(model, attention=neighborhood_attention_sdpa)
    for pixels in decoder.decode(latents, generator=generator, chunk_frames=16): ...

It computes LTX2VideoDiffusionDecoderModel.decode without tiling, within rounding, on that model's weights.
"""

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch
from diffusers.utils.torch_utils import randn_tensor

from layers.fused.heads import softmax_bound
from layers.fused.selftest import verify
from layers.neighborhood_attention.backend import NeighborhoodAttention
from layers.neighborhood_attention.flash import MAX_SOFTMAX_BOUND
from runner_models.ltx2.decoder.block import Block, Context
from runner_models.ltx2.decoder.flow import Node, Watch, drive, split_frames
from runner_models.ltx2.decoder.geometry import Stage, ghost_latents, stages_of
from runner_models.ltx2.decoder.halo import Shard
from runner_models.ltx2.decoder.steps import Canvas, Crop, Start, StepEntry, StepExit, Upsample, modulations, steps_of


class ExactDecoder:
    """Decodes with the weights of a stock LTX2VideoDiffusionDecoderModel, which is not changed."""

    def __init__(self, model: Any, *, attention: NeighborhoodAttention) -> None:
        self.model, self.attention = model, attention

    @torch.inference_mode()
    def decode(
        self,
        latents: torch.Tensor,
        *,
        generator: torch.Generator | None = None,
        num_inference_steps: int | None = None,
        chunk_frames: int | None = None,
        shard: Shard | None = None,
        as_bytes: bool = False,
        watch: Watch = lambda node: nullcontext(),
    ) -> Iterator[torch.Tensor]:
        """Decode (B, 128, T, h, w) denormalised latents, in the model's dtype and on its device.

        Args:
            latents: of the whole clip, the same on every rank.
            generator: the noise is drawn from it as the stock model draws it, for the whole clip.
            num_inference_steps: None for the checkpoint's.
            chunk_frames: video frames a call, a multiple of 8; None decodes the clip in one go. Memory beside the
                weights grows with it and not with the clip.
            shard: this rank's part. All ranks of its group call this with the same arguments.
            as_bytes: give finished bytes instead of pixels.
            watch: entered around every piece of work.

        Yields:
            (B, n, 3, 32 h', 32 w') pixels in about [-1, 1], in order, on the device, of this rank's rows h' or columns
            w'; at most chunk_frames at a time. With `as_bytes` (B, n, 32 h', 32 w', 3) uint8.

        Raises:
            ValueError: a chunk that is no multiple of 8, or latents smaller than a window.
        """
        config, decoder = self.model.config, self.model.decoder
        ratio, ghosts = config["temporal_compression_ratio"], ghost_latents(config)
        if chunk_frames is not None and (chunk_frames < ratio or chunk_frames % ratio):
            raise ValueError(f"chunk_frames {chunk_frames} is not a positive multiple of {ratio}")
        stages = stages_of(config, latents.shape[2:])
        chunk_frames = chunk_frames or ratio * (latents.shape[2] + ghosts)
        if shard is not None and len(shard.bounds) == 1:
            shard = None
        prepare_offloaded(self.model)
        verify(latents.device, latents.dtype)
        canvas = self._canvas(latents, stages[-1], generator, shard, keep=chunk_frames >= stages[-1].grid[0])
        steps = num_inference_steps or decoder.default_num_inference_steps
        nodes = self._nodes(
            stages, chunk_frames, canvas, steps=steps, batch=latents.shape[0], shard=shard, as_bytes=as_bytes
        )
        source = self._embedded(latents, ghosts, nodes[0].cap, shard)
        yield from drive(nodes, source, split=split_frames, watch=watch)

    def _canvas(
        self, latents: torch.Tensor, stage: Stage, generator: torch.Generator | None, shard: Shard | None, *, keep: bool
    ) -> Canvas:
        """The whole clip's noise, drawn as the stock model does; this rank's part, on the host unless `keep`."""
        patch = self.model.decoder.patch_size
        frames, rows, columns = stage.grid
        shape = (latents.shape[0], self.model.decoder.out_channels, frames, rows * patch, columns * patch)
        noise = randn_tensor(shape, generator=generator, device=latents.device, dtype=latents.dtype)
        if shard is not None:
            begin, end = shard.scaled(stage.scale[shard.axis] * patch)[shard.rank]
            noise = noise.narrow(2 + shard.axis, begin, end - begin).clone()
        if not keep and noise.device.type != "cpu":
            waiting = torch.empty(noise.shape, dtype=noise.dtype, pin_memory=True)
            noise = waiting.copy_(noise)
        return Canvas(noise, latents.device)

    def _embedded(self, latents: torch.Tensor, ghosts: int, cap: int, shard: Shard | None) -> Iterator[torch.Tensor]:
        """Latent frames and the ghosts that repeat the last, this rank's rows, projected, `cap` at a time."""
        if shard is not None:
            begin, end = shard.own
            latents = latents.narrow(2 + shard.axis, begin, end - begin)
        total = latents.shape[2] + ghosts
        for first in range(0, total, cap):
            index = torch.arange(first, min(first + cap, total), device=latents.device).clamp(max=latents.shape[2] - 1)
            part = latents.index_select(2, index)
            yield self.model.decoder.conv_in(part.permute(0, 2, 3, 4, 1))

    def _nodes(
        self,
        stages: tuple[Stage, ...],
        chunk_frames: int,
        canvas: Canvas,
        *,
        steps: int,
        batch: int,
        shard: Shard | None,
        as_bytes: bool,
    ) -> list[Node[torch.Tensor]]:
        decoder, last = self.model.decoder, stages[-1]
        bounds = self._softmax_bounds(canvas.noise.dtype)
        caps = [stage.cap(chunk_frames, last.scale[0]) for stage in stages]
        nodes: list[Node[torch.Tensor]] = []
        for stage, cap, blocks, upsample in zip(stages, caps, decoder.det_stages, decoder.upsamples, strict=False):
            nodes += [
                Block(block, stage, cap, attention=self.attention, shard=shard, softmax_bound=bounds.get(block))
                for block in blocks
            ]
            nodes.append(Upsample(upsample, cap))
        cap = caps[-1]
        nodes.append(Crop(last.grid[0], cap))
        context = Context()
        device, dtype = canvas.device, canvas.noise.dtype
        timeline = steps_of(decoder, steps, device)
        for index, step in enumerate(timeline):
            entry = StepEntry(decoder, step, cap)
            nodes.append(Start(context, canvas, entry, cap) if index == 0 else entry)
            for block, modulation in zip(decoder.diff_blocks, modulations(decoder, step, batch, dtype), strict=True):
                nodes.append(
                    Block(
                        block,
                        last,
                        cap,
                        attention=self.attention,
                        shard=shard,
                        context=context,
                        modulation=modulation,
                        softmax_bound=bounds.get(block),
                        last=index == steps - 1 and block is decoder.diff_blocks[-1],
                    )
                )
            nodes.append(StepExit(decoder, entry, cap, as_bytes=as_bytes and index == steps - 1))
        return nodes

    def _softmax_bounds(self, dtype: torch.dtype) -> dict[Any, float]:
        """Of every block, from the gains that it has now; none where the attention has no use for them."""
        if dtype != torch.bfloat16 or not getattr(self.attention, "takes_bound", False):
            return {}
        decoder = self.model.decoder
        blocks = [*(block for blocks in decoder.det_stages for block in blocks), *decoder.diff_blocks]
        bounds = [softmax_bound(block.attn.norm_q.weight, block.attn.norm_k.weight) for block in blocks]
        found = zip(blocks, torch.stack(bounds).tolist(), strict=True)  # one wait for the device
        return {block: bound for block, bound in found if bound <= MAX_SOFTMAX_BOUND}


def prepare_offloaded(model: Any) -> None:
    """What diffusers' apply_forward_hook does for `decode`: bring an offloaded model to its device."""
    hook = getattr(model, "_hf_hook", None)
    if hook is not None and hasattr(hook, "pre_forward"):
        hook.pre_forward(model)
