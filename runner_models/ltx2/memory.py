"""Device memory a request needs, estimated before anything is loaded.

Weights are counted; activations are sizes of one tensor times a factor measured on an H200 in bf16 (1536x1024x121,
torch 2.11): one transformer forward peaked 7.0 GiB above its weights, the untiled decode 64.6 GiB.
"""

from pathlib import Path

from runner_models import TINY_NAMES, split_folder
from runner_models.ltx2.build import PARAMETERS
from runner_models.ltx2.load import parameter_counts, read_config
from runner_models.ltx2.recipes import Recipe, token_counts
from runner_models.ltx2.tiny import TINY_PARAMETERS

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}

DENOISE_TENSORS = 37
"""Live (tokens, width) tensors at the peak of a transformer forward."""
DECODE_TENSORS = 11.4
"""Live (frames, height/4, width/4, channels) tensors at the peak of the untiled decode's last stage."""


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
) -> dict[str, int]:
    """Bytes of one rank by item: `weights`, `denoise` and `decode` activations, and `peak`.

    Every rank holds all weights; the video tokens are shared by `sequence_degree` ranks, and the first decodes alone.

    `peak` is the weights plus the larger of the two activations; with `offload`, the most that one component needs
    while it runs alone.

    Raises:
        SetupError: a checkpoint folder that lacks files or holds damaged ones.
    """
    element = DTYPE_BYTES[dtype]
    tiny = model in TINY_NAMES and load_format != "dummy"
    named = split_folder(model)[0]
    folder = named if named.is_dir() and not tiny and load_format != "dummy" else None
    transformer, decoder = (
        read_config(name, model, recipe, load_format=load_format) for name in ("transformer", "diffusion_decoder")
    )
    weights = _weights(folder, recipe, tiny)
    inner_width = transformer["num_attention_heads"] * transformer["attention_head_dim"]
    decode_width = decoder["decoder_stage_channels"][-1]
    stages = token_counts(recipe, height=height, width=width, num_frames=num_frames, frame_rate=recipe.frame_rate)
    tokens = -(-max(stage.video for stage in stages) // sequence_degree)
    batch = 2 if max(recipe.video.cfg, recipe.audio.cfg) > 1 else 1
    denoise = int(DENOISE_TENSORS * batch * tokens * inner_width * element)
    decode = int(DECODE_TENSORS * num_frames * (height // 4) * (width // 4) * decode_width * element)
    total = sum(weights.values()) * element
    alone = {name: count * element for name, count in weights.items()}
    alone["transformer"] += denoise
    alone["diffusion_decoder"] += decode
    return {
        "weights": total,
        "denoise": denoise,
        "decode": decode,
        "peak": max(alone.values()) if offload else total + max(denoise, decode),
    }


def _weights(folder: Path | None, recipe: Recipe, tiny: bool) -> dict[str, int]:
    if folder is not None:
        return parameter_counts(folder, recipe)
    counts = TINY_PARAMETERS if tiny else PARAMETERS
    return {name: count for name, count in counts.items() if recipe.stages == 2 or name != "latent_upsampler"}
