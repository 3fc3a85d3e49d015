"""What LTX-2.5 can be asked for: the one place that says why a request is refused, and what would be taken.

Messages name the command line's flags, which are the fields of a request.
"""

import math
from collections.abc import Iterator
from typing import Protocol

from runner_models.ltx2.recipes import (
    AUDIO_LATENTS_PER_SECOND,
    PROMPT_REGISTERS,
    TEMPORAL_RATIO,
    Recipe,
    token_counts,
)

MIN_FRAMES = 17
MIN_STEPS = 2
"""With one step the full model's schedule ends at its terminal value before it starts: 0/0, and every latent is NaN."""
MAX_SEED = 2**63 - 1
MAX_SECONDS = 3600
"""A lower frame rate than this needs is a typing error, and would ask for millions of audio tokens."""
MAX_PROMPT_TOKENS = 4096
"""Positions that the text connectors know (connector_rope_base_seq_len)."""


class Sizes(Protocol):
    """What is checked: a `runner_models.api.VideoRequest` has it, and so has the runner's config."""

    @property
    def height(self) -> int: ...
    @property
    def width(self) -> int: ...
    @property
    def num_frames(self) -> int: ...
    @property
    def frame_rate(self) -> float: ...
    @property
    def num_inference_steps(self) -> int: ...
    @property
    def guidance_scale(self) -> float: ...
    @property
    def max_sequence_length(self) -> int: ...
    @property
    def seed(self) -> int: ...


def request_problems(request: Sizes, recipe: Recipe) -> Iterator[str]:
    """One line for each mistake, with the nearest values that work; none for a request that can be made."""
    yield from _video_problems(request, recipe)
    yield from _sampling_problems(request, recipe)


def _video_problems(request: Sizes, recipe: Recipe) -> Iterator[str]:
    for name in ("height", "width"):
        yield from _size_problem(name, getattr(request, name), recipe)
    count = request.num_frames
    if count < MIN_FRAMES:
        yield f"--num_frames {count} is below the minimum of {MIN_FRAMES}; the nearest valid count is {MIN_FRAMES}."
    elif (count - 1) % TEMPORAL_RATIO:
        lower = (count - 1) // TEMPORAL_RATIO * TEMPORAL_RATIO + 1
        yield f"--num_frames {count} is not 8*k+1; the nearest valid counts are {lower} and {lower + TEMPORAL_RATIO}."
    rate = request.frame_rate
    if not (math.isfinite(rate) and rate > 0):
        yield f"--frame_rate {rate:g} is not a number above 0; the model was trained at {recipe.frame_rate:g}."
    elif not math.isfinite(count / rate) or count / rate > MAX_SECONDS:
        lowest = math.ceil(count / MAX_SECONDS * 1000) / 1000
        yield (
            f"--num_frames {count} at --frame_rate {rate:g} last longer than an hour; give fewer frames, or at least "
            f"{lowest:g} frames per second."
        )
    elif count >= MIN_FRAMES and _audio_latents(request, recipe) < 1:
        highest = math.floor(count * AUDIO_LATENTS_PER_SECOND)
        yield f"--frame_rate {rate:g} leaves no room for sound; for {count} frames give at most {highest}."


def _audio_latents(request: Sizes, recipe: Recipe) -> int:
    counts = token_counts(
        recipe,
        height=request.height,
        width=request.width,
        num_frames=request.num_frames,
        frame_rate=request.frame_rate,
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


def _sampling_problems(request: Sizes, recipe: Recipe) -> Iterator[str]:
    steps, scale = request.num_inference_steps, request.guidance_scale
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
    length = request.max_sequence_length
    if length < 1 or length % PROMPT_REGISTERS:
        lower = length // PROMPT_REGISTERS * PROMPT_REGISTERS
        near = f"are {lower} and {lower + PROMPT_REGISTERS}" if lower > 0 else f"is {PROMPT_REGISTERS}"
        yield f"--max_sequence_length {length} is not a multiple of {PROMPT_REGISTERS}; the nearest valid {near}."
    elif length > MAX_PROMPT_TOKENS:
        yield f"--max_sequence_length {length} is above the maximum; the nearest valid is {MAX_PROMPT_TOKENS}."
    if not 0 <= request.seed <= MAX_SEED:
        nearest = min(max(request.seed, 0), MAX_SEED)
        yield f"--seed {request.seed} is not from 0 to {MAX_SEED}; the nearest is {nearest}."
