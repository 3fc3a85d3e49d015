"""The nodes between the blocks: upsampling, the crop of ghost frames, and the two ends of a denoising step.

Layout (B, T, H, W, C) between nodes; pixels are (B, C, F, H, W) inside a step and (B, F, C, H, W) between steps, so
that frames are dim 1 for every node.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from diffusers.models.autoencoders.ltx2_diffusion_decoder import _unpatchify

from layers.fused.pixels import patches_to_bytes
from layers.fused.tokens import rms_norm
from runner_models.ltx2.decoder.block import Context
from runner_models.ltx2.decoder.buffers import FrameBuffer
from runner_models.ltx2.decoder.pointwise import Modulation, frame_slices
from runner_models.ltx2.pixels import to_uint8
from runner_models.ltx2.qkv import plain_linear


class Upsample:
    """LTX2VideoVaePixelShuffleUpsampler; the clip's first frame loses its duplicate, as there.

    The rows of the weights are put in the order of the shuffled output, so that what is shuffled after the product are
    whole tokens instead of single numbers.
    """

    def __init__(self, stock: Any, cap: int) -> None:
        self.stride, self.channels, self.cap = stock.stride, stock.out_channels, cap
        proj = plain_linear(stock, "proj")
        self.weight, self.bias = (
            x.unflatten(0, (self.channels, -1)).transpose(0, 1).flatten(0, 1) for x in (proj.weight, proj.bias)
        )
        self.at_start = True

    def push(self, frames: torch.Tensor) -> Iterator[torch.Tensor]:
        """(B, n, H, W, C) -> frames, rows and columns times their strides."""
        upsampled = [self._upsample(frames)]
        del frames  # else the nodes below work while this one, suspended, keeps them: 2.2 GiB at 1536x1024x121
        yield upsampled.pop()

    def _upsample(self, frames: torch.Tensor) -> torch.Tensor:
        batch, count, height, width, _ = frames.shape
        t, h, w = self.stride
        at_start, self.at_start = self.at_start, False
        x = F.linear(frames, self.weight, self.bias).view(batch, count, height, width, t, h, w, self.channels)
        x = x.permute(0, 1, 4, 2, 5, 3, 6, 7)
        drop = int(at_start and t == 2)
        whole = x.new_empty((batch, count * t - drop, height * h, width * w, self.channels))
        if drop:
            copy_wide_(whole[:, 0].view(batch, height, h, width, w, self.channels), x[:, 0, 1])
        copy_wide_(whole[:, drop:].view(batch, count - drop, t, height, h, width, w, self.channels), x[:, drop:])
        return whole


def copy_wide_(target: torch.Tensor, source: torch.Tensor) -> None:
    """target.copy_(source), contiguous in the last dim, in pieces of 16 bytes where they divide: a strided copy goes
    number by number, and complex128 is the largest number that there is."""
    if target.shape[-1] * target.element_size() % 16 == 0:
        target, source = target.view(torch.complex128), source.view(torch.complex128)
    target.copy_(source)


class Crop:
    """Passes the first `length` frames on and drops the ghosts after them."""

    def __init__(self, length: int, cap: int) -> None:
        self.left, self.cap = length, cap

    def push(self, frames: torch.Tensor) -> Iterator[torch.Tensor]:
        """Frames within the length."""
        count = min(self.left, frames.shape[1])
        self.left -= count
        if count:
            yield frames[:, :count]


class Canvas:
    """The noise of the whole clip (this rank's part of it), wherever it waits; given out frame by frame."""

    def __init__(self, noise_BCFHW: torch.Tensor, device: torch.device) -> None:
        self.noise, self.device = noise_BCFHW, device
        self.given = 0

    def take(self, count: int) -> torch.Tensor:
        """The next `count` frames (B, C, count, H, W) on the device."""
        part = self.noise[:, :, self.given : self.given + count]
        self.given += count
        if part.device == self.device:
            return part
        # Frames of one channel lie together: copied so, pinned memory is read without waiting for the device.
        out = torch.empty(part.shape, dtype=part.dtype, device=self.device)
        for target, source in zip(out.flatten(0, 1), part.flatten(0, 1), strict=True):
            target.copy_(source, non_blocking=True)
        return out


class Start:
    """Context frames in, (B, n, H, W, C) hidden frames of the first step out: starts stage 5."""

    def __init__(self, context: Context, canvas: Canvas, entry: "StepEntry", cap: int) -> None:
        self.context, self.canvas, self.entry, self.cap = context, canvas, entry, cap

    def push(self, frames: torch.Tensor) -> Iterator[torch.Tensor]:
        """The noise of these frames, embedded; the frames themselves go to the context."""
        count = frames.shape[1]
        self.context.frames.append(frames)
        del frames
        yield self.entry.embed(self.canvas.take(count))


@dataclass(frozen=True)
class Step:
    """One reverse step: from time `now` to `next`, both fp32 scalars; predicts x0 or v."""

    now: torch.Tensor
    next: torch.Tensor
    predicts: str
    only: bool
    """The single step of an x0 model, whose prediction is the picture."""


class StepEntry:
    """Noisy pixels to hidden frames; keeps the pixels until the step's prediction for them is there."""

    def __init__(self, decoder: Any, step: Step, cap: int) -> None:
        self.decoder, self.step, self.cap = decoder, step, cap
        self.noisy = FrameBuffer()

    def push(self, frames: torch.Tensor) -> Iterator[torch.Tensor]:
        """(B, n, C, H, W) noisy pixels -> (B, n, H/4, W/4, channels)."""
        yield self.embed(frames.transpose(1, 2))

    def embed(self, noisy_BCFHW: torch.Tensor) -> torch.Tensor:
        """The stock patchify, in one copy, and projection."""
        if not self.step.only:
            self.noisy.append(noisy_BCFHW.transpose(1, 2))
        batch, colours, count, height, width = noisy_BCFHW.shape
        patch = self.decoder.patch_size
        rows = noisy_BCFHW.unflatten(4, (-1, patch)).unflatten(3, (-1, patch))
        patches = rows.new_empty((batch, count, height // patch, width // patch, colours, patch, patch))
        patches.copy_(rows.permute(0, 2, 3, 5, 1, 6, 4))
        return self.decoder.conv_in_x_t(patches.flatten(4))


class StepExit:
    """Hidden frames to pixels: the prediction, or the noisy pixels moved along it (reverse Euler, in fp32)."""

    def __init__(self, decoder: Any, entry: StepEntry, cap: int, *, as_bytes: bool = False) -> None:
        """`as_bytes`: (B, n, H, W, 3) uint8 instead of (B, n, 3, H, W) pixels; see layers/fused/pixels.py."""
        self.decoder, self.entry, self.cap, self.as_bytes = decoder, entry, cap, as_bytes

    def push(self, frames: torch.Tensor) -> Iterator[torch.Tensor]:
        """(B, n, H, W, C) -> (B, n, 3, 4 H, 4 W) pixels, or their bytes."""
        norm, conv_out = self.decoder.norm_out, self.decoder.conv_out
        patches = frames.new_empty((*frames.shape[:-1], conv_out.out_features))
        for index, x in frame_slices(frames):
            patches[:, index] = conv_out(rms_norm(x, norm.weight, eps=norm.eps))
        del frames
        yield self._finished(patches)

    def _finished(self, patches: torch.Tensor) -> torch.Tensor:
        if self.as_bytes and self.entry.step.only:
            return patches_to_bytes(patches, self.decoder.patch_size)
        pixels = self._pixels(patches)
        return to_uint8(pixels.transpose(1, 2)) if self.as_bytes else pixels

    def _pixels(self, patches: torch.Tensor) -> torch.Tensor:
        predicted = _unpatchify(patches.permute(0, 4, 1, 2, 3), self.decoder.patch_size).transpose(1, 2)
        step = self.entry.step
        if step.only:
            return predicted
        noisy = self.entry.noisy.take(patches.shape[1])
        velocity, noisy_fp32 = predicted.float(), noisy.float()
        if step.predicts == "x0":
            velocity = (noisy_fp32 - velocity) / step.now
        return (noisy_fp32 - (step.now - step.next) * velocity).to(noisy.dtype)


def steps_of(decoder: Any, count: int, device: torch.device) -> list[Step]:
    """The times of `count` steps, as LTX2VideoDiffusionDecoder3d.denoise has them."""
    predicts = decoder.model_output_type
    times = torch.linspace(1.0, 1.0 / count, count, device=device, dtype=torch.float32)
    following = [*times[1:], torch.zeros((), device=device)]
    only = count == 1 and predicts == "x0"
    return [Step(now, after, predicts, only) for now, after in zip(times, following, strict=True)]


def modulations(decoder: Any, step: Step, batch: int, dtype: torch.dtype) -> list[Modulation]:
    """Of every diffusion block at this step: the shared AdaLN plus the block's own table."""
    embedded = decoder.t_embedder(
        decoder.timestep_scale_multiplier * step.now.expand(batch),
        resolution=None,
        aspect_ratio=None,
        batch_size=batch,
        hidden_dtype=dtype,
    )
    shared = decoder.shared_adaln(embedded)
    found = []
    for block in decoder.diff_blocks:
        scale1, shift1, _, scale2, shift2, _, _ = (
            part + table.view(1, 1, 1, 1, -1) for part, table in zip(shared, block.scale_shift_table, strict=True)
        )
        found.append(Modulation(1 + scale1, shift1, 1 + scale2, shift2))
    return found
