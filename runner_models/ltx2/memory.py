"""Device memory a request needs, estimated before anything is loaded.

Weights are counted, and what the exact decode holds (decoder/budget.py). Other activations are the size of one tensor
times a factor measured on an H200 in bf16 (1536x1024x121, torch 2.11): one transformer forward peaked 7.0 GiB above its
weights, the stock untiled decode 64.6 GiB.
"""

from collections.abc import Mapping
from typing import Any

from runner_models import TINY_NAMES
from runner_models.ltx2.build import PARAMETERS
from runner_models.ltx2.decoder.budget import decode_bytes
from runner_models.ltx2.decoder.options import DecodeOptions
from runner_models.ltx2.load import local_folder, parameter_counts, read_config
from runner_models.ltx2.recipes import SPATIAL_RATIO, TEMPORAL_RATIO, Recipe, token_counts
from runner_models.ltx2.tiny import TINY_PARAMETERS

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}

DENOISE_TENSORS = 37
"""Live (tokens, width) tensors at the peak of a transformer forward."""
STOCK_DECODE_TENSORS = 11.4
"""Live (frames, height/4, width/4, channels) tensors at the peak of the stock decode's last stage; taken for the
autoencoder's decoder too, which was not measured."""
LARGEST_TILE = (88, 768, 768)
"""Frames, height and width in pixels of the stock decode's tiles, the trailing one included."""


def estimate(
    recipe: Recipe,
    *,
    height: int,
    width: int,
    num_frames: int,
    dtype: str,
    load_format: str,
    model: str,
    offload: bool = False,
    sequence_degree: int = 1,
    decode: DecodeOptions | None = None,
) -> dict[str, int]:
    """Bytes of one rank by item: `weights`, `denoise` and `decode` activations, `decode_in_chunks`, and `peak`.

    Every rank holds all weights; the video tokens are shared by `sequence_degree` ranks, and with `decode.parallel` the
    decode is too. `decode` is that of the whole clip at once, `decode_in_chunks` of the chunk asked for, else of the
    smallest: the exact decode goes over to chunks where the whole does not fit, so that this is what it must have.

    `peak` is the least that must be there: the weights plus the larger activation; with `offload`, the most that one
    component needs while it runs alone.

    Raises:
        SetupError: a checkpoint folder that lacks files or holds damaged ones.
    """
    element = DTYPE_BYTES[dtype]
    transformer, decoder = (
        read_config(name, model, recipe, load_format=load_format) for name in ("transformer", "diffusion_decoder")
    )
    weights = _weights(model, recipe, load_format)
    inner_width = transformer["num_attention_heads"] * transformer["attention_head_dim"]
    stages = token_counts(recipe, height=height, width=width, num_frames=num_frames, frame_rate=recipe.frame_rate)
    tokens = -(-max(stage.video for stage in stages) // sequence_degree)
    batch = 2 if max(recipe.video.cfg, recipe.audio.cfg) > 1 else 1
    denoise = int(DENOISE_TENSORS * batch * tokens * inner_width * element)
    whole, least = _decode_bytes(
        decode or DecodeOptions(), decoder, (num_frames, height, width), element=element, ranks=sequence_degree
    )
    total = sum(weights.values()) * element
    alone = {name: count * element for name, count in weights.items()}
    alone["transformer"] += denoise
    alone["diffusion_decoder"] += least
    return {
        "weights": total,
        "denoise": denoise,
        "decode": whole,
        "decode_in_chunks": least,
        "peak": max(alone.values()) if offload else total + max(denoise, least),
    }


def _decode_bytes(
    options: DecodeOptions, config: Mapping[str, Any], video: tuple[int, int, int], *, element: int, ranks: int
) -> tuple[int, int]:
    """At once, and as little as can be, for a video of (frames, height, width)."""
    frames, height, width = video
    if options.method == "exact":
        grid = ((frames - 1) // TEMPORAL_RATIO + 1, height // SPATIAL_RATIO, width // SPATIAL_RATIO)
        ranks = min(ranks, max(grid[1:])) if options.parallel else 1
        whole = decode_bytes(config, grid, element=element, ranks=ranks)
        chunk = options.chunk_frames or TEMPORAL_RATIO
        return whole, min(whole, decode_bytes(config, grid, element=element, chunk_frames=chunk, ranks=ranks))
    if options.method == "tiled":
        frames, height, width = (min(size, tile) for size, tile in zip(video, LARGEST_TILE, strict=True))
    tokens = frames * (height // 4) * (width // 4)
    needed = int(STOCK_DECODE_TENSORS * tokens * config["decoder_stage_channels"][-1] * element)
    return needed, needed


def _weights(model: str, recipe: Recipe, load_format: str) -> dict[str, int]:
    folder = local_folder(model, load_format=load_format)
    if folder is not None:
        return parameter_counts(folder, recipe)
    counts = TINY_PARAMETERS if model in TINY_NAMES and load_format != "dummy" else PARAMETERS
    return {name: count for name, count in counts.items() if recipe.stages == 2 or name != "latent_upsampler"}
