"""The decoder's attention chosen for one run: what the checkpoint's decoder needs, and the grids of one request."""

import os
from collections.abc import Mapping
from typing import Any

import torch

from layers.neighborhood_attention.backend import Target, architecture
from layers.neighborhood_attention.fastest import Grid
from layers.neighborhood_attention.select import MAKERS, Everywhere, Selection, select_attention
from runner_models.api import SetupError
from runner_models.ltx2.recipes import SPATIAL_RATIO, TEMPORAL_RATIO

DISABLE_VARIABLE = "LTX_RUNNER_DISABLE_ATTENTION"
"""Backends that auto and fastest leave out, with commas between them."""


def select_decoder_attention(
    requested: str, config: Mapping[str, Any], *, device: torch.device, dtype: torch.dtype, everywhere: Everywhere
) -> Selection:
    """The attention for a diffusion decoder with this config, the same on every rank; no weight is needed.

    Raises SetupError for a named backend that cannot be used here, with the reason, and for an unknown name.
    """
    kernels = [*config["decoder_stage_kernels"], config["decoder_stage5_kernel"]]
    target = Target(
        device=device,
        arch=architecture(device),
        dtype=dtype,
        head_dim=config["decoder_head_dim"],
        kernel_sizes=tuple(dict.fromkeys((k[0], k[1], k[2]) for k in kernels)),
    )
    disabled = [name for name in os.environ.get(DISABLE_VARIABLE, "").replace(" ", "").split(",") if name]
    allowed = [name for name in MAKERS if name != "sdpa"]
    if not set(disabled) <= set(allowed):
        raise SetupError(f"{DISABLE_VARIABLE}={','.join(disabled)} may name {', '.join(allowed)}.")
    try:
        return select_attention(requested, target, disabled=disabled, everywhere=everywhere)
    except ValueError as error:
        raise SetupError(str(error)) from error


def decoder_grids(config: Mapping[str, Any], *, height: int, width: int, num_frames: int) -> list[Grid]:
    """The whole attention grid of each of the decoder's stages; height and width in pixels."""
    kernels = [*config["decoder_stage_kernels"], config["decoder_stage5_kernel"]]
    ghosts = kernels[0][0] // 2 * 2  # latent frames the stock decoder appends, and crops before stage 5
    latent_frames = (num_frames - 1) // TEMPORAL_RATIO + 1 + ghosts
    t, h, w = latent_frames, height // SPATIAL_RATIO, width // SPATIAL_RATIO
    grids = []
    for stage, kernel in enumerate(kernels):
        heads = config["decoder_stage_channels"][stage] // config["decoder_head_dim"]
        shape = (t, h, w) if stage < len(kernels) - 1 else (num_frames, h, w)
        size = (kernel[0], kernel[1], kernel[2])
        grids.append(Grid(size, shape, heads, config["decoder_stage_depths"][stage]))
        if stage < len(kernels) - 1:
            stride = config["decoder_upsample_strides"][stage]
            t, h, w = t * stride[0] - (stride[0] - 1), h * stride[1], w * stride[2]
    return grids
