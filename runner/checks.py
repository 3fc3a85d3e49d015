"""Every check of a RunConfig that needs neither weights nor files, in one place."""

import dataclasses
import logging
from collections.abc import Iterator

from runner.config import RunConfig
from runner.errors import UsageError
from runner_models.ltx2.limits import request_problems
from runner_models.ltx2.recipes import SPATIAL_RATIO, TEMPORAL_RATIO

logger = logging.getLogger(__name__)


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
        *request_problems(config, config.recipe),
        *_run_problems(config),
        *_decode_problems(config),
        *_degree_problems(config, world_size, num_heads),
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
