"""RunConfig, the resolved flags of one run. What is allowed in them: runner/checks.py."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from runner.errors import UsageError
from runner.flags import FLAGS
from runner_models import find_recipe
from runner_models.ltx2.decoder.options import DecodeOptions
from runner_models.ltx2.recipes import DEFAULT_NEGATIVE_PROMPT, Recipe


@dataclass(frozen=True)
class RunConfig:
    """One run: the flags, with the model's defaults filled in. Sizes in pixels, frames and frames per second.

    `negative_prompt` holds one for all prompts or one for each. `device` and `dtype` may be "auto" until
    `runner.checks.check`.
    """

    model: str
    task: str
    prompt: tuple[str, ...]
    negative_prompt: tuple[str, ...]
    input_images: tuple[str, ...]
    resize_input_images: bool
    height: int
    width: int
    num_frames: int
    frame_rate: float
    num_inference_steps: int
    guidance_scale: float
    max_sequence_length: int
    seed: int
    load_format: str
    revision: str | None
    device: str
    dtype: str
    ulysses_degree: int
    ring_degree: int
    data_parallel_degree: int
    attention_backend: str | None
    decoder_attention: str
    use_torch_compile: bool
    use_parallel_vae: bool
    enable_tiling: bool
    decode_chunk_frames: int | None
    vae_decode: str
    enable_model_cpu_offload: bool
    num_iterations: int
    warmup_calls: int
    profile: bool
    output_directory: str
    dry_run: bool

    @classmethod
    def from_values(cls, values: Mapping[str, Any]) -> RunConfig:
        """Typed values by flag name, defaults filled in from the flag and the model.

        Raises:
            UsageError: no model, an unknown model, or no task.
        """
        if "model" not in values:
            raise UsageError("--model is missing; for a first try give --model tiny, for real videos --model LTX-2.5.")
        try:
            recipe = find_recipe(values["model"])
        except ValueError as error:
            raise UsageError(str(error)) from error
        if "task" not in values:
            raise UsageError("--task is missing; allowed: t2v, i2v.")
        defaults = {
            "height": recipe.height,
            "width": recipe.width,
            "num_frames": recipe.num_frames,
            "frame_rate": recipe.frame_rate,
            "num_inference_steps": recipe.steps,
            "guidance_scale": recipe.video.cfg,
            "max_sequence_length": recipe.max_sequence_length,
        }
        fields = [field.name for field in dataclasses.fields(cls)]
        config = cls(**{name: values.get(name, defaults.get(name, FLAGS[name].default)) for name in fields})
        if config.negative_prompt:
            return config
        return dataclasses.replace(config, negative_prompt=("" if recipe.distilled else DEFAULT_NEGATIVE_PROMPT,))

    def to_json(self) -> dict[str, Any]:
        """JSON types only, by flag name; `runner.flags.read_values` reads it back."""
        return {
            name: list(value) if isinstance(value, tuple) else value for name, value in dataclasses.asdict(self).items()
        }

    @property
    def recipe(self) -> Recipe:
        """How the model is sampled."""
        return find_recipe(self.model)

    @property
    def sequence_degree(self) -> int:
        """Ranks that make one video together."""
        return self.ulysses_degree * self.ring_degree

    @property
    def decode_options(self) -> DecodeOptions:
        """How latents become frames."""
        streaming = self.enable_tiling or self.decode_chunk_frames is not None
        return DecodeOptions(self.vae_decode, self.use_parallel_vae, streaming, self.decode_chunk_frames)

    @property
    def prompts(self) -> tuple[str, ...]:
        """One for each video."""
        return self.prompt

    @property
    def negative_prompts(self) -> tuple[str, ...]:
        """One for each prompt."""
        return self.negative_prompt * len(self.prompt) if len(self.negative_prompt) == 1 else self.negative_prompt

    def output_stem(self, index: int) -> str:
        """File name, without suffix, of prompt `index`'s video; xfuser's pattern."""
        return (
            f"{self.recipe.output_name}_u{self.ulysses_degree}r{self.ring_degree}_tc_{self.use_torch_compile}"
            f"_{self.height}x{self.width}_{self.task}_{index}"
        )
