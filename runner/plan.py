"""What a run will do, worked out from its config alone: the --dry_run."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

from runner.config import RunConfig
from runner.sizes import readable
from runner_models.ltx2.recipes import (
    DISTILLED_SIGMAS,
    STAGE_2_SIGMAS,
    Guidance,
    TokenCounts,
    token_counts,
)


def plan(
    config: RunConfig,
    *,
    memory_bytes: Mapping[str, int] | None = None,
    available_bytes: int | None = None,
    misfit: str | None = None,
) -> dict[str, Any]:
    """The resolved run in JSON types, units in the key names.

    Args:
        config: checked (`runner.checks.check`).
        memory_bytes: estimated device memory of one rank by item, with its `peak`; left out where unknown.
        available_bytes: what that rank may use.
        misfit: why it does not fit, from `memory_problem`.
    """
    recipe = config.recipe
    counts = token_counts(
        recipe, height=config.height, width=config.width, num_frames=config.num_frames, frame_rate=config.frame_rate
    )
    scale = 2 if recipe.distilled else 1
    stages = [_stage(config, index, counts[index]) for index in range(len(counts))]
    seconds = config.num_frames / config.frame_rate
    return {
        "model": config.model,
        "recipe": recipe.name,
        "task": config.task,
        "device": config.device,
        "dtype": config.dtype,
        "load_format": config.load_format,
        "ranks": {
            "ulysses_degree": config.ulysses_degree,
            "ring_degree": config.ring_degree,
            "data_parallel_degree": config.data_parallel_degree,
        },
        "video": {
            "height_pixels": config.height,
            "width_pixels": config.width,
            "num_frames": config.num_frames,
            "frames_per_second": config.frame_rate,
            "duration_seconds": seconds,
        },
        "audio": {"duration_seconds": seconds, "latent_frames": counts[0].audio},
        "stages": stages,
        "upsample_factor": scale if recipe.distilled else None,
        "video_decode": {
            "method": config.vae_decode,
            "ranks": config.sequence_degree if config.use_parallel_vae else 1,
            "chunk_frames": config.decode_chunk_frames,
            "streaming": config.decode_options.streaming,
        },
        "prompt_tokens": config.max_sequence_length,
        "seed": config.seed,
        "warmup_calls": config.warmup_calls,
        "num_iterations": config.num_iterations,
        "outputs": [
            f"{config.output_directory.rstrip('/')}/{config.output_stem(i)}.mp4" for i in range(len(config.prompts))
        ],
        "memory_bytes": dict(memory_bytes) if memory_bytes is not None else None,
        "available_memory_bytes": available_bytes,
        "fits": misfit is None,
        "misfit": misfit,
    }


def _stage(config: RunConfig, index: int, counts: TokenCounts) -> dict[str, Any]:
    recipe = config.recipe
    frames, rows, columns = counts.grid
    # Stage 1 of the two runs at half size.
    divisor = 2 if recipe.distilled and index == 0 else 1
    sigmas = (DISTILLED_SIGMAS, STAGE_2_SIGMAS)[index] if recipe.distilled else None
    return {
        "name": f"stage{index + 1}",
        "height_pixels": config.height // divisor,
        "width_pixels": config.width // divisor,
        "latent_grid": {"frames": frames, "rows": rows, "columns": columns},
        "video_tokens": counts.video,
        "audio_tokens": counts.audio,
        "steps": len(sigmas) if sigmas else config.num_inference_steps,
        # The full model's sigmas are shifted by its number of video tokens when it runs.
        "sigmas": list(sigmas) if sigmas else None,
        "guidance": None if recipe.distilled else _guidance(config),
    }


def _guidance(config: RunConfig) -> dict[str, Any]:
    def scales(guidance: Guidance) -> dict[str, float]:
        return {
            "cfg": guidance.cfg,
            "stg": guidance.stg,
            "modality": guidance.modality,
            "rescale": guidance.rescale,
        }

    recipe = config.recipe
    return {"video": scales(recipe.video) | {"cfg": config.guidance_scale}, "audio": scales(recipe.audio)}


def render(plan: Mapping[str, Any]) -> str:
    """The plan as text for a terminal."""
    video, audio, ranks = plan["video"], plan["audio"], plan["ranks"]
    rows = [
        ("model", f"{plan['model']} ({plan['recipe']}), {plan['task']}, load format {plan['load_format']}"),
        ("device", f"{plan['device']}, {plan['dtype']}"),
        ("ranks", " x ".join(f"{name.removesuffix('_degree')} {degree}" for name, degree in ranks.items())),
        (
            "video",
            f"{video['width_pixels']}x{video['height_pixels']} (width x height), {video['num_frames']} frames at "
            f"{video['frames_per_second']:g} frames/s: {video['duration_seconds']:.2f} s",
        ),
        ("audio", f"{audio['duration_seconds']:.2f} s, {audio['latent_frames']} latent frames"),
        ("prompt", f"{plan['prompt_tokens']} tokens, seed {plan['seed']}"),
    ]
    for index, stage in enumerate(plan["stages"]):
        if index:
            rows.append(("upsample", f"latents x{plan['upsample_factor']} along height and width"))
        rows += _stage_rows(stage)
    rows.append(("decode", _decode_row(plan["video_decode"])))
    rows.append(("runs", f"{plan['warmup_calls']} to warm up, {plan['num_iterations']} timed"))
    rows += [("output" if index == 0 else "", path) for index, path in enumerate(plan["outputs"])]
    memory = plan["memory_bytes"]
    if memory is not None:
        items = ", ".join(f"{name} {readable(size)}" for name, size in memory.items())
        available = plan["available_memory_bytes"]
        rest = "" if available is None else f"; {readable(available)} available"
        rows.append(("memory", f"estimated per rank: {items}{rest}"))
    if plan["misfit"]:
        rows.append(("", f"does not fit here: {plan['misfit']}"))
    return "\n".join(["Plan (nothing is loaded)", *(f"  {name:<9} {text}" for name, text in rows)])


def _decode_row(decode: Mapping[str, Any]) -> str:
    if decode["method"] != "exact":
        how = ""
    elif decode["chunk_frames"]:
        how = f", in chunks of {decode['chunk_frames']} frames"
    elif decode["streaming"]:
        how = ", in chunks of what memory is free"
    else:
        how = ", at once where that fits, else in chunks"
    return f"{decode['method']} on {decode['ranks']} rank{'s' if decode['ranks'] > 1 else ''}{how}"


def _stage_rows(stage: Mapping[str, Any]) -> list[tuple[str, str]]:
    grid = stage["latent_grid"]
    rows = [
        (
            stage["name"],
            f"{stage['steps']} steps at {stage['width_pixels']}x{stage['height_pixels']}: "
            f"{grid['frames']}x{grid['rows']}x{grid['columns']} latents (frames x rows x columns), "
            f"{stage['video_tokens']} video + {stage['audio_tokens']} audio tokens",
        )
    ]
    if stage["sigmas"] is not None:
        rows.append(("", f"sigmas {', '.join(f'{sigma:g}' for sigma in stage['sigmas'])}"))
    if stage["guidance"] is not None:
        rows += [
            ("", f"{modality} guidance: {', '.join(f'{name} {scale:g}' for name, scale in scales.items())}")
            for modality, scales in stage["guidance"].items()
        ]
    return rows


def memory_request(config: RunConfig) -> dict[str, Any]:
    """What `runner_models.ltx2.memory.estimate` is to estimate for this run, beside its recipe."""
    return {
        "model": config.model,
        "load_format": config.load_format,
        "height": config.height,
        "width": config.width,
        "num_frames": config.num_frames,
        "dtype": config.dtype,
        "offload": config.enable_model_cpu_offload,
        "sequence_degree": config.sequence_degree,
        "decode": config.decode_options,
    }


def memory_problem(
    config: RunConfig, *, estimate: Callable[..., Mapping[str, int]], available_bytes: int
) -> str | None:
    """Why the run does not fit `available_bytes` of device memory, and what would; None when it fits.

    Args:
        config: checked.
        estimate: `runner_models.ltx2.memory.estimate`, or one with its signature.
        available_bytes: memory this rank may use.
    """

    def peak(**changes: Any) -> int:
        return estimate(config.recipe, **(memory_request(config) | changes))["peak"]

    def fits(**changes: Any) -> bool:
        return peak(**changes) <= available_bytes

    if fits():
        return None
    remedies = []
    if config.sequence_degree > 1 and not config.use_parallel_vae:
        spread = dataclasses.replace(config.decode_options, parallel=True)
        if fits(decode=spread):
            remedies.append("--use_parallel_vae")
    if config.device == "cuda" and not config.enable_model_cpu_offload and fits(offload=True):
        remedies.append("--enable_model_cpu_offload")
    if config.dtype == "float32" and fits(dtype="bfloat16"):
        remedies.append("--dtype bf16")
    frames = _largest(2, (config.num_frames - 1) // 8, lambda k: fits(num_frames=8 * k + 1))
    if frames:
        remedies.append(f"--num_frames {8 * frames + 1}")
    size = _smaller_size(config, fits)
    if size:
        remedies.append(f"--height {size[0]} --width {size[1]}")
    advice = f"what fits: {', or '.join(remedies)}." if remedies else _last_resort(config, fits)
    return (
        f"--height {config.height} --width {config.width} --num_frames {config.num_frames} needs about "
        f"{readable(peak())} of {config.device} memory and {readable(available_bytes)} is available; {advice}"
    )


def _last_resort(config: RunConfig, fits: Callable[..., bool]) -> str:
    """Two changes at once, when no single one is enough."""
    smallest = {"height": config.recipe.min_size, "width": config.recipe.min_size, "num_frames": 17}
    offload = {"offload": True} if config.device == "cuda" else {}
    half = {"dtype": "bfloat16"} if config.dtype == "float32" else {}
    for changes, flags in ((offload, "--enable_model_cpu_offload"), (half, "--dtype bf16")):
        if changes and fits(**smallest, **changes):
            return f"with {flags} a smaller size fits."
    if fits(**smallest, **offload, **half):
        return "with --enable_model_cpu_offload and --dtype bf16 a smaller size fits."
    return "no size of this model fits; use a machine with more memory."


def _smaller_size(config: RunConfig, fits: Callable[..., bool]) -> tuple[int, int] | None:
    """The largest height and width of the same shape, rounded down to valid sizes, that fit."""
    step, smallest = config.recipe.size_step, config.recipe.min_size

    def scaled(part: int) -> tuple[int, int]:
        # Whole steps of the longer side; the shorter one follows.
        longer = max(config.height, config.width)
        height, width = (
            max(smallest, math.floor(side * part * step / longer) // step * step)
            for side in (config.height, config.width)
        )
        return height, width

    def part_fits(part: int) -> bool:
        height, width = scaled(part)
        return fits(height=height, width=width)

    steps = max(config.height, config.width) // step
    part = _largest(1, steps - 1, part_fits)
    return scaled(part) if part else None


def _largest(low: int, high: int, fits: Callable[[int], bool]) -> int:
    """The largest number from low to high that fits, by bisection; 0 when none does."""
    if high < low or not fits(low):
        return 0
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low
