"""A complete, tiny, random LTX-2.5 checkpoint, made in the user's cache on first use.

Every component and every stage of the real model at a size a laptop CPU runs in seconds. The picture is noise. The
decoder keeps the production kernels and head_dim and two blocks a stage, so that faults of windows, shards and chunks
show; gains are sharpened so that a wrong position or a dropped prompt moves the output by tens of per cent.
"""

import json
import logging
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch

from runner_models.ltx2.build import build_component, component_config, make_scheduler

logger = logging.getLogger(__name__)

RECIPE_VERSION = 2
"""Raise it whenever the bytes of the checkpoint change; older caches are then left alone."""

_SIZES = "sizes.json"

_HEADS, _HEAD_DIM, _AUDIO_HEAD_DIM = 8, 16, 8
_TEXT_WIDTH, _TEXT_LAYERS = 48, 3
_AUDIO_CHANNELS = 32  # 8 latent channels x 16 mel bins / 4; must equal the audio VAE's base_channels

_OVERRIDES: dict[str, dict[str, Any]] = {
    "text_encoder": {
        "hidden_size": _TEXT_WIDTH,
        "intermediate_size": 96,
        "num_hidden_layers": _TEXT_LAYERS,
        "layer_types": ["sliding_attention"] * (_TEXT_LAYERS - 1) + ["full_attention"],
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "global_head_dim": 32,
        "sliding_window": 128,
        "max_position_embeddings": 2048,
    },
    "connectors": {
        "caption_channels": _TEXT_WIDTH,
        "text_proj_in_factor": _TEXT_LAYERS + 1,
        "video_connector_num_attention_heads": _HEADS,
        "video_connector_attention_head_dim": _HEAD_DIM,
        "video_connector_num_layers": 1,
        "video_connector_num_learnable_registers": 64,
        "audio_connector_num_attention_heads": _HEADS,
        "audio_connector_attention_head_dim": _AUDIO_HEAD_DIM,
        "audio_connector_num_layers": 1,
        "audio_connector_num_learnable_registers": 64,
        "video_hidden_dim": _HEADS * _HEAD_DIM,
        "audio_hidden_dim": _HEADS * _AUDIO_HEAD_DIM,
    },
    "transformer": {
        "num_attention_heads": _HEADS,
        "attention_head_dim": _HEAD_DIM,
        "cross_attention_dim": _HEADS * _HEAD_DIM,
        "audio_in_channels": _AUDIO_CHANNELS,
        "audio_out_channels": _AUDIO_CHANNELS,
        "audio_num_attention_heads": _HEADS,
        "audio_attention_head_dim": _AUDIO_HEAD_DIM,
        "audio_cross_attention_dim": _HEADS * _AUDIO_HEAD_DIM,
        "num_layers": 2,
        "caption_channels": _TEXT_WIDTH,
    },
    "vae": {
        "block_out_channels": [16, 32, 64, 64],
        "decoder_block_out_channels": [16, 32, 32, 64],
        "layers_per_block": [1] * 5,
        "decoder_layers_per_block": [1] * 5,
    },
    "audio_vae": {"base_channels": _AUDIO_CHANNELS, "num_res_blocks": 1, "mel_bins": 16},
    "vocoder": {
        "in_channels": 32,
        "hidden_channels": 64,
        "resnet_kernel_sizes": [3],
        "resnet_dilations": [[1, 3, 5]],
        "bwe_in_channels": 32,
        "bwe_hidden_channels": 32,
        "bwe_resnet_kernel_sizes": [3],
        "bwe_resnet_dilations": [[1, 3, 5]],
        "num_mel_channels": 16,
    },
    "latent_upsampler": {"mid_channels": 32, "num_blocks_per_stage": 1},
    "diffusion_decoder": {
        "decoder_stage_channels": [256, 128, 64, 64, 64],
        "decoder_stage_depths": [2, 2, 2, 2, 3],
        "decoder_upsample_channel_reductions": [2, 2, 1, 1],
        "decoder_t_emb_dim": 64,
    },
}

TINY_PARAMETERS = {
    "text_encoder": 97_715,
    "connectors": 298_768,
    "transformer": 1_424_576,
    "vae": 3_114_277,
    "latent_upsampler": 369_376,
    "diffusion_decoder": 3_406_704,
    "audio_vae": 2_577_650,
    "vocoder": 619_182,
}
"""Parameters by component, so that memory is estimated before the checkpoint is made; a test counts them."""
_WORDS = (
    "a an the of in on at with and is video cat dog robot dancing sunset ocean waves person walking city "
    "street night rain potter shaping clay vase camera slowly pans"
)


def cache_root() -> Path:
    """The user's cache folder for this project: `$XDG_CACHE_HOME` or `~/.cache`, then `ltx-runner`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ltx-runner"


def tiny_folder(root: Path | None = None) -> Path:
    """Where the tiny checkpoint is, or will be."""
    return (root or cache_root()) / f"tiny-v{RECIPE_VERSION}"


def tiny_checkpoint(root: Path | None = None) -> Path:
    """The folder of the tiny checkpoint, made first if it is not there; 54 MB, a few seconds, no network.

    Made under a temporary name and renamed, so that a reader never sees half of it and two makers do not collide.
    """
    target = tiny_folder(root)
    root = target.parent
    if _is_whole(target):
        return target
    root.mkdir(parents=True, exist_ok=True)
    building = Path(tempfile.mkdtemp(prefix=f".tiny-v{RECIPE_VERSION}-", dir=root))
    logger.info("making the tiny random checkpoint in %s", target)
    try:
        _write_checkpoint(building / "new")
        if target.exists() and not _is_whole(target):
            logger.warning("%s is damaged and is made again", target)
            target.rename(building / "damaged")
        try:
            (building / "new").rename(target)
        except OSError:  # another process renamed its own first; both are the same bytes
            if not _is_whole(target):
                raise
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return target


def _is_whole(folder: Path) -> bool:
    """Whether every file that was written is there with all its bytes; `_SIZES` is written last."""
    try:
        sizes = json.loads((folder / _SIZES).read_text())
        return all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError):
        return False


def _write_checkpoint(folder: Path) -> None:
    from diffusers import LTX2Pipeline

    parts = {name: _tiny_component(name, seed) for seed, name in enumerate(_OVERRIDES)}
    pipe = LTX2Pipeline(
        scheduler=make_scheduler(full=False),
        tokenizer=stand_in_tokenizer(),
        **{name: parts[name] for name in ("text_encoder", "connectors", "transformer", "vae", "audio_vae", "vocoder")},
    )
    pipe.save_pretrained(folder, safe_serialization=True)
    outside_the_pipeline = {
        "transformer_full": _tiny_component("transformer", len(_OVERRIDES)),
        "latent_upsampler": parts["latent_upsampler"],
        "diffusion_decoder": parts["diffusion_decoder"],
    }
    for name, module in outside_the_pipeline.items():
        module.save_pretrained(folder / name)
    sizes = {str(path.relative_to(folder)): path.stat().st_size for path in folder.rglob("*") if path.is_file()}
    (folder / _SIZES).write_text(json.dumps(sizes, indent=1, sort_keys=True))


def tiny_config(name: str) -> dict[str, Any]:
    """The config of one component: the released one with smaller sizes."""
    overrides = dict(_OVERRIDES[name])
    if name == "text_encoder":
        overrides["vocab_size"] = len(stand_in_tokenizer())
    return component_config(name, overrides)


def _tiny_component(name: str, seed: int) -> Any:
    config = tiny_config(name)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module: Any = build_component(name, config)
    if name == "transformer":
        module.keyframes_abs_pos_embedding.normal_(0, 0.2, generator=torch.Generator().manual_seed(seed))
        _sharpen(module, qk=2.0, vo=1.7)
    elif name == "diffusion_decoder":
        _sharpen(module, qk=1.5, vo=1.4)
    if hasattr(module, "latents_mean"):
        # One draw for the video VAE and the decoder: they share the latent space.
        generator = torch.Generator().manual_seed(100 + (name == "audio_vae"))
        channels = module.latents_mean.shape
        module.latents_mean.copy_(torch.randn(channels, generator=generator) * 0.1)
        module.latents_std.copy_(torch.rand(channels, generator=generator) * 0.5 + 0.75)
    return module


@torch.no_grad()
def _sharpen(module: torch.nn.Module, *, qk: float, vo: float) -> None:
    """Scale q/k norm gains and v/out weights: the default initialisation makes every softmax nearly uniform.

    Plain, a wrong RoPE or a dropped prompt moves the output by 1 %; with the gains used here by 10 to 21 %, while bf16
    stays within 1.5 % of fp32. Larger gains are chaotic.
    """
    for name, parameter in module.named_parameters():
        if name.endswith(("norm_q.weight", "norm_k.weight")):
            parameter.mul_(qk)
        elif name.endswith(("to_v.weight", "to_out.0.weight")):
            parameter.mul_(vo)
        elif name.endswith("context_proj.weight"):
            parameter.mul_(2.0)


def stand_in_tokenizer() -> Any:
    """A Gemma tokenizer with a few words, ASCII and byte fallback: any prompt tokenises, nothing is downloaded."""
    from tokenizers.processors import TemplateProcessing
    from transformers import GemmaTokenizer

    vocabulary = {"<pad>": 0, "<eos>": 1, "<bos>": 2, "<unk>": 3, "<mask>": 4}
    merges: list[tuple[str, str]] = []

    def add(token: str) -> None:
        vocabulary.setdefault(token, len(vocabulary))

    for token in [f"<0x{byte:02X}>" for byte in range(256)] + ["▁"] + [chr(code) for code in range(33, 127)]:
        add(token)
    for word in (
        _WORDS.split()
    ):  # left to right, then the separator, which Gemma's pre-tokeniser merges with the word before it
        piece = word[0]
        for letter in [*word[1:], "▁"]:
            if (piece, letter) not in merges:
                merges.append((piece, letter))
            piece += letter
            add(piece)
    tokenizer = GemmaTokenizer(vocab=vocabulary, merges=merges, model_max_length=1024, padding_side="left")
    # The real tokenizer prepends <bos>; without it an empty prompt would be all padding.
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<bos> $A", pair="<bos> $A $B", special_tokens=[("<bos>", vocabulary["<bos>"])]
    )
    return tokenizer
