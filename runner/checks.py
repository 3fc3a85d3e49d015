"""Every check of a RunConfig that needs neither weights nor files, in one place."""

import dataclasses
import logging
import math
from collections.abc import Iterator

from runner.config import RunConfig
from runner.errors import UsageError
from runner.flags import FLAGS
from runner_models.ltx2.recipes import (
    AUDIO_LATENTS_PER_SECOND,
    PROMPT_REGISTERS,
    SPATIAL_RATIO,
    TEMPORAL_RATIO,
    Recipe,
    token_counts,
)

logger = logging.getLogger(__name__)

MIN_FRAMES = 17
MIN_STEPS = 2
"""With one step the full model's schedule ends at its terminal value before it starts: 0/0, and every latent is NaN."""
MAX_SEED = 2**63 - 1
MAX_SECONDS = 3600
"""A lower frame rate than this needs is a typing error, and would ask for millions of audio tokens."""

NOT_YET: tuple[str, ...] = ("profile",)
"""Flags that take their default only, until what they ask for exists."""


def check(
    config: RunConfig,
    *,
    world_size: int = 1,
    local_world_size: int = 1,
    gpu_count: int = 0,
    num_heads: int | None = None,
) -> RunConfig:
    """Check everything that needs neither weights nor files, and settle device and dtype.

    Args:
        config: the run as asked for.
        world_size: processes in all; `local_world_size` on this machine.
        gpu_count: GPUs that this process sees.
        num_heads: attention heads of the transformer, where known: the Ulysses degree must divide them.

    Returns:
        The config with `device` "cpu" or "cuda" and `dtype` "float32", "bfloat16" or "float16".

    Raises:
        UsageError: one line for each mistake, naming the flag, its value, what is allowed and what would work.
    """
    problems = [
        *_prompt_problems(config),
        *_video_problems(config),
        *_sampling_problems(config),
        *_run_problems(config),
        *_decode_problems(config),
        *(_not_yet_problems(config) or _degree_problems(config, world_size, num_heads)),
        *_device_problems(config, local_world_size, gpu_count),
    ]
    if problems:
        raise UsageError("\n".join(problems))
    if config.recipe.distilled and any(config.negative_prompt):
        logger.info("--negative_prompt has no effect: the distilled model runs without guidance")
    device = ("cuda" if gpu_count else "cpu") if config.device == "auto" else config.device
    dtype = ("bfloat16" if device == "cuda" else "float32") if config.dtype == "auto" else config.dtype
    return dataclasses.replace(config, device=device, dtype=dtype)


def _prompt_problems(config: RunConfig) -> Iterator[str]:
    if not config.prompt:
        yield "--prompt is missing; give one or more, or --dataset_path."
    for index, prompt in enumerate(config.prompt):
        if not prompt.strip():
            yield f"--prompt number {index + 1} is blank; say what to show."
    if len(config.negative_prompt) not in (1, len(config.prompt)):
        yield (
            f"--negative_prompt has {len(config.negative_prompt)} texts for {len(config.prompt)} prompts; "
            f"give 1 for all or {len(config.prompt)}."
        )
    images = len(config.input_images)
    if config.task == "i2v" and images != 1:
        yield f"--task i2v needs exactly one of --input_images, got {images}."
    if config.task == "t2v" and images:
        yield f"--task t2v takes no --input_images, got {images}; use --task i2v, or leave the image out."


def _video_problems(config: RunConfig) -> Iterator[str]:
    recipe = config.recipe
    for name in ("height", "width"):
        yield from _size_problem(name, getattr(config, name), recipe)
    count = config.num_frames
    if count < MIN_FRAMES:
        yield f"--num_frames {count} is below the minimum of {MIN_FRAMES}; the nearest valid count is {MIN_FRAMES}."
    elif (count - 1) % TEMPORAL_RATIO:
        lower = (count - 1) // TEMPORAL_RATIO * TEMPORAL_RATIO + 1
        yield f"--num_frames {count} is not 8*k+1; the nearest valid counts are {lower} and {lower + TEMPORAL_RATIO}."
    rate = config.frame_rate
    if not (math.isfinite(rate) and rate > 0):
        yield f"--frame_rate {rate:g} is not a number above 0; the model was trained at {recipe.frame_rate:g}."
    elif not math.isfinite(count / rate) or count / rate > MAX_SECONDS:
        lowest = math.ceil(count / MAX_SECONDS * 1000) / 1000
        yield (
            f"--num_frames {count} at --frame_rate {rate:g} last longer than an hour; give fewer frames, or at least "
            f"{lowest:g} frames per second."
        )
    elif count >= MIN_FRAMES and _audio_latents(config) < 1:
        highest = math.floor(count * AUDIO_LATENTS_PER_SECOND)
        yield f"--frame_rate {rate:g} leaves no room for sound; for {count} frames give at most {highest}."


def _audio_latents(config: RunConfig) -> int:
    counts = token_counts(
        config.recipe,
        height=config.height,
        width=config.width,
        num_frames=config.num_frames,
        frame_rate=config.frame_rate,
    )
    return counts[0].audio


def _size_problem(name: str, size: int, recipe: Recipe) -> Iterator[str]:
    step, smallest = recipe.size_step, recipe.min_size
    rule = f"the {recipe.name} model takes multiples of {step} from {smallest}"
    if size < smallest:
        yield f"--{name} {size} is below the minimum of {smallest}; {rule}, the nearest is {smallest}."
    elif size % step:
        lower = size // step * step
        yield f"--{name} {size} is not a multiple of {step}; {rule}, the nearest are {lower} and {lower + step}."


def _sampling_problems(config: RunConfig) -> Iterator[str]:
    recipe, steps, scale = config.recipe, config.num_inference_steps, config.guidance_scale
    if recipe.distilled:
        if steps != recipe.steps:
            yield (
                f"--num_inference_steps {steps} is not allowed: the distilled model has a fixed schedule of "
                f"{recipe.steps} steps; leave it out or give {recipe.steps}."
            )
        if scale != 1.0:
            yield (
                f"--guidance_scale {scale:g} is not allowed: the distilled model was trained to run without guidance, "
                "which is 1; leave it out, or use --model LTX-2.5-full."
            )
    else:
        if steps < MIN_STEPS:
            yield f"--num_inference_steps {steps} is too few; the nearest valid number is {MIN_STEPS}."
        if not (math.isfinite(scale) and scale >= 1):
            yield f"--guidance_scale {scale:g} is not a number from 1 (no video CFG); the nearest valid value is 1."
    length = config.max_sequence_length
    if length < 1 or length % PROMPT_REGISTERS:
        lower = length // PROMPT_REGISTERS * PROMPT_REGISTERS
        near = f"are {lower} and {lower + PROMPT_REGISTERS}" if lower > 0 else f"is {PROMPT_REGISTERS}"
        yield f"--max_sequence_length {length} is not a multiple of {PROMPT_REGISTERS}; the nearest valid {near}."
    if not 0 <= config.seed <= MAX_SEED:
        yield f"--seed {config.seed} is not from 0 to {MAX_SEED}; the nearest is {min(max(config.seed, 0), MAX_SEED)}."


def _run_problems(config: RunConfig) -> Iterator[str]:
    for name, smallest in (("num_iterations", 1), ("warmup_calls", 0)):
        value = getattr(config, name)
        if value < smallest:
            yield f"--{name} {value} is below the minimum of {smallest}; give {smallest} or more."


def _decode_problems(config: RunConfig) -> Iterator[str]:
    chunk, ranks = config.decode_chunk_frames, config.sequence_degree
    if chunk is not None and (chunk < TEMPORAL_RATIO or chunk % TEMPORAL_RATIO):
        lower = chunk // TEMPORAL_RATIO * TEMPORAL_RATIO
        near = f"are {lower} and {lower + TEMPORAL_RATIO}" if lower > 0 else f"is {TEMPORAL_RATIO}"
        yield f"--decode_chunk_frames {chunk} is not a multiple of {TEMPORAL_RATIO}; the nearest valid {near}."
    if config.vae_decode != "exact" and chunk is not None:
        yield f"--decode_chunk_frames {chunk} needs --vae_decode exact; {config.vae_decode} has no chunks."
    if config.vae_decode == "conv" and config.use_parallel_vae and ranks > 1:
        yield "--use_parallel_vae spreads --vae_decode exact and tiled; conv decodes on one rank: leave one out."
    rows = max(config.height, config.width) // SPATIAL_RATIO
    if config.vae_decode == "exact" and config.use_parallel_vae and ranks > rows:
        yield (
            f"--use_parallel_vae with {ranks} ranks a video, and --height {config.height} --width {config.width} has "
            f"{rows} latent rows to share; use at most {rows} ranks a video, or leave --use_parallel_vae out."
        )


def _not_yet_problems(config: RunConfig) -> list[str]:
    problems = []
    for name in NOT_YET:
        value, default = getattr(config, name), FLAGS[name].default
        if value != default:
            shown = "" if value is True else f" {value}"
            problems.append(f"--{name}{shown} is not supported yet; leave it out.")
    return problems


def _degree_problems(config: RunConfig, world_size: int, num_heads: int | None) -> list[str]:
    from layers.parallel_state import check_degrees  # imports torch

    try:
        check_degrees(
            world_size=world_size,
            ulysses_degree=config.ulysses_degree,
            ring_degree=config.ring_degree,
            data_parallel_degree=config.data_parallel_degree,
            num_heads=num_heads,
        )
    except ValueError as error:
        return [str(error)]
    return []


def _device_problems(config: RunConfig, local_world_size: int, gpu_count: int) -> Iterator[str]:
    if config.device == "cuda" and not gpu_count:
        yield "--device cuda asks for a GPU and torch sees none here; use --device cpu, or install a torch for the GPU."
    elif config.device != "cpu" and gpu_count and local_world_size > gpu_count:
        yield (
            f"{local_world_size} processes on this machine and {gpu_count} GPUs; start {gpu_count} with "
            f"torchrun --nproc_per_node={gpu_count}, or use --device cpu."
        )
    if config.enable_model_cpu_offload and (config.device == "cpu" or not gpu_count):
        yield "--enable_model_cpu_offload frees GPU memory and this run has no GPU; leave it out."
