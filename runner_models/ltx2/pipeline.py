"""One request through LTX-2.5's stages, on the stock diffusers pipelines.

encode -> stage1 -> upsample -> stage2 -> audio_decode -> video_decode (distilled); encode -> stage1 -> audio_decode ->
video_decode (full). One generator per request, drawn from in the order of the stock pipelines: stage-1 video and audio
noise, stage-2 noise, the decoder's canvas.
"""

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from tqdm import tqdm

from layers.attention_backends import DEFAULT_BACKEND
from layers.neighborhood_attention.fastest import choose_fastest
from layers.neighborhood_attention.select import report_calls
from layers.parallel_state import ParallelState
from runner_models.api import StageTimer, VideoOutput, VideoRequest
from runner_models.ltx2.attention import install_attention
from runner_models.ltx2.attentions import Attentions
from runner_models.ltx2.compilation import compile_blocks, compile_seconds
from runner_models.ltx2.decoder.options import DecodeOptions
from runner_models.ltx2.decoder.video import VideoDecoder
from runner_models.ltx2.decoder_attention import decoder_grids
from runner_models.ltx2.limits import request_problems
from runner_models.ltx2.load import Parts, Source
from runner_models.ltx2.ranges import step_ranges
from runner_models.ltx2.recipes import DEFAULT_NEGATIVE_PROMPT, DISTILLED_SIGMAS, STAGE_2_SIGMAS, Guidance, Recipe
from runner_models.ltx2.transformer import parallelize

_BAR = "{desc}: {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}, {rate_inv_fmt}]"
_DECODE_BAR = "{desc}: {percentage:3.0f}%|{bar}| [{elapsed}<{remaining}]"


class Ltx2Model:
    """A loaded LTX-2.5 (a `runner_models.api.VideoModel`): load once, generate many."""

    def __init__(
        self,
        parts: Parts,
        recipe: Recipe,
        *,
        source: Source,
        state: ParallelState,
        attentions: Attentions,
        decode: DecodeOptions | None = None,
        offload: bool = False,
    ) -> None:
        """Spread `parts` over the ranks of `state`, each with a whole copy.

        `offload` keeps each model on the host except while it runs; `parts` must then be on the CPU.
        """
        from diffusers import LTX2ImageToVideoPipeline, LTX2LatentUpsamplePipeline

        self.recipe = recipe
        self.source = source
        self.state = state
        self.device = state.device
        self.attentions = attentions
        parallelize(parts.pipeline.transformer, state, backend=attentions.video)
        self.text_to_video = parts.pipeline
        self.image_to_video = LTX2ImageToVideoPipeline(**parts.pipeline.components)
        self.upsample = None
        if parts.latent_upsampler is not None:
            self.upsample = LTX2LatentUpsamplePipeline(vae=parts.pipeline.vae, latent_upsampler=parts.latent_upsampler)
        self.decoder = parts.diffusion_decoder
        # Offloaded weights are joined after each move.
        install_attention(self.decoder, attentions.decoder.attention, fuse=not offload)
        self.stages = tuple(
            stage
            for stage in ("encode", "stage1", "upsample", "stage2", "audio_decode", "video_decode")
            if recipe.stages == 2 or stage not in ("upsample", "stage2")
        )
        if offload:
            self._offload()
        self.video_decoder = VideoDecoder(
            self.decoder,
            self.text_to_video.vae,
            attention=attentions.decoder.attention,
            options=decode or DecodeOptions(),
            state=state,
        )

    def _offload(self) -> None:
        from accelerate import cpu_offload_with_hook

        for pipe in (self.text_to_video, self.image_to_video, self.upsample):
            if pipe is not None:
                pipe.enable_model_cpu_offload(device=self.device)
        self.decoder, self._decoder_hook = cpu_offload_with_hook(self.decoder, self.device)

    def request(self, prompt: str, **changes: Any) -> VideoRequest:
        """A request with this recipe's defaults; `changes` are fields of `VideoRequest`."""
        recipe = self.recipe
        defaults = VideoRequest(
            prompt=prompt,
            negative_prompt=DEFAULT_NEGATIVE_PROMPT,
            image=None,
            height=recipe.height,
            width=recipe.width,
            num_frames=recipe.num_frames,
            frame_rate=recipe.frame_rate,
            num_inference_steps=recipe.steps,
            guidance_scale=recipe.video.cfg,
            max_sequence_length=recipe.max_sequence_length,
            seed=42,
        )
        return replace(defaults, **changes)

    @torch.inference_mode()
    def prepare(self, request: VideoRequest) -> None:
        """Measure what this run chooses by measurement; see `runner_models.api.VideoModel`."""
        grids = decoder_grids(
            self.decoder.config, height=request.height, width=request.width, num_frames=request.num_frames
        )
        choose_fastest(self.attentions.decoder, grids, everywhere=self.state.all_gather_object)

    def finish(self) -> None:
        """Log what only the end of the run knows; see `runner_models.api.VideoModel`."""
        report_calls(self.attentions.decoder, everywhere=self.state.all_gather_object)

    @torch.inference_mode()
    def compile(self, request: VideoRequest) -> float:
        """Compile the transformer's blocks for the shapes of `request` and return the seconds spent compiling.

        Runs each denoising stage with two steps, which is every graph there is; the video decoder is not compiled.
        """
        compile_blocks(self.text_to_video.transformer)
        before = compile_seconds()
        self._denoise(replace(request, num_inference_steps=2), steps=2)
        return compile_seconds() - before

    @torch.inference_mode()
    def generate(
        self, request: VideoRequest, *, timer: StageTimer = lambda stage: nullcontext(), progress: bool = False
    ) -> VideoOutput | None:
        """Make one video; see `runner_models.api.VideoModel`.

        Raises ValueError for a request that this model cannot make, a line for each mistake.
        """
        self._check(request)
        # Every rank encodes the prompt and draws the whole noise, from one seed: nothing to send, nobody waits.
        video_latents, audio_latents, generator = self._denoise(request, timer=timer, progress=progress)
        leads = self.state.is_replica_leader
        if not leads and not self.video_decoder.parallel:
            return None
        if leads:
            with timer("audio_decode"):
                audio = self._decode_audio(audio_latents)
        frames = self._decode_video(video_latents, generator, progress, timer)
        if not leads:
            assert not list(frames), "frames leave by the leader"
            return None
        rate = int(self.text_to_video.vocoder.config.output_sampling_rate)
        return VideoOutput(frames=frames, audio=audio, audio_sample_rate=rate)

    def _check(self, request: VideoRequest) -> None:
        problems = list(request_problems(request, self.recipe))
        if request.image is not None and request.image.size != (request.width, request.height):
            size = "{}x{}".format(*request.image.size)
            problems.append(f"the image is {size} (width x height) and the video {request.width}x{request.height}.")
        if problems:
            raise ValueError("\n".join(problems))

    def describe(self) -> dict[str, Any]:
        """What was loaded and chosen, for the sidecar and metrics."""
        return {
            "recipe": self.recipe.name,
            "checkpoint": str(self.source.folder) if self.source.folder else None,
            "revision": self.source.revision,
            "random_weights": self.source.random_weights,
            "device": str(self.device),
            "dtype": str(self.text_to_video.transformer.dtype).removeprefix("torch."),
            "attention_backend": self.attentions.video.name if self.attentions.video else DEFAULT_BACKEND,
            "decoder_attention": self.attentions.decoder.describe(),
            "video_decode": self.video_decoder.describe(),
        }

    def _encode(self, pipe: Any, request: VideoRequest) -> dict[str, torch.Tensor | None]:
        guided = max(self._video_guidance(request).cfg, self.recipe.audio.cfg) > 1.0
        names = ("prompt_embeds", "prompt_attention_mask", "negative_prompt_embeds", "negative_prompt_attention_mask")
        encoded = pipe.encode_prompt(
            prompt=request.prompt,
            negative_prompt=request.negative_prompt,
            do_classifier_free_guidance=guided,
            max_sequence_length=request.max_sequence_length,
            device=self.device,
        )
        return dict(zip(names, encoded, strict=True))

    def _video_guidance(self, request: VideoRequest) -> Guidance:
        video = self.recipe.video
        return Guidance(request.guidance_scale, video.stg, video.modality, video.rescale)

    def _denoise_options(
        self, pipe: Any, request: VideoRequest, prompts: dict[str, Any], generator: torch.Generator
    ) -> dict[str, Any]:
        video, audio = self._video_guidance(request), self.recipe.audio
        layers = pipe.transformer.config.num_layers
        # A checkpoint with fewer blocks than the guided one (the tiny one) skips its last instead.
        blocks = sorted({min(block, layers - 1) for block in self.recipe.stg_blocks})
        options = {
            **prompts,
            "num_frames": request.num_frames,
            "frame_rate": request.frame_rate,
            "guidance_scale": video.cfg,
            "stg_scale": video.stg,
            "modality_scale": video.modality,
            "guidance_rescale": video.rescale,
            "audio_guidance_scale": audio.cfg,
            "audio_stg_scale": audio.stg,
            "audio_modality_scale": audio.modality,
            "audio_guidance_rescale": audio.rescale,
            "spatio_temporal_guidance_blocks": blocks or None,
            "generator": generator,
            "output_type": "latent",
            "return_dict": False,
        }
        return options if request.image is None else options | {"image": request.image}

    def _denoise(
        self,
        request: VideoRequest,
        *,
        timer: StageTimer = lambda stage: nullcontext(),
        progress: bool = False,
        steps: int | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Generator]:
        """Prompt to denormalised video and audio latents, and the generator as it then stands.

        `steps` cuts the schedule of each stage short.
        """
        pipe = self.text_to_video if request.image is None else self.image_to_video
        generator = torch.Generator(self.device).manual_seed(request.seed)
        with timer("encode"):
            prompts = self._encode(pipe, request)
        options = self._denoise_options(pipe, request, prompts, generator)
        full = {"height": request.height, "width": request.width}
        if self.upsample is None:
            with timer("stage1"), step_ranges(pipe.transformer, "stage1") as step_end:
                _configure_bar(pipe, "denoise", progress)
                options |= full | {"num_inference_steps": request.num_inference_steps}
                return *pipe(callback_on_step_end=step_end, **options), generator
        with timer("stage1"), step_ranges(pipe.transformer, "stage1") as step_end:
            _configure_bar(pipe, "stage 1", progress)
            half = {"height": request.height // 2, "width": request.width // 2, "callback_on_step_end": step_end}
            video_latents, audio_latents = pipe(sigmas=list(DISTILLED_SIGMAS[:steps]), **half, **options)
        with timer("upsample"):
            video_latents = self.upsample(latents=video_latents, output_type="latent", return_dict=False)[0]
        with timer("stage2"), step_ranges(pipe.transformer, "stage2") as step_end:
            _configure_bar(pipe, "stage 2", progress)
            options |= full | {"callback_on_step_end": step_end, "noise_scale": STAGE_2_SIGMAS[0]}
            start = {"latents": video_latents, "audio_latents": audio_latents}
            return *pipe(sigmas=list(STAGE_2_SIGMAS[:steps]), **start, **options), generator

    def _decode_audio(self, latents: torch.Tensor) -> torch.Tensor:
        """(1, 8, L, mel/4) latents -> (channels, samples) fp32 on the CPU."""
        audio_vae, vocoder = self.text_to_video.audio_vae, self.text_to_video.vocoder
        mel = audio_vae.decode(latents.to(audio_vae.dtype), return_dict=False)[0]
        return vocoder(mel)[0].float().cpu()

    @torch.inference_mode()
    def _decode_video(
        self, latents: torch.Tensor, generator: torch.Generator, progress: bool, timer: StageTimer
    ) -> Iterator[torch.Tensor]:
        """(1, 128, T, H/32, W/32) denormalised latents -> (n, H, W, 3) uint8 pieces on the CPU, as they are decoded."""
        bar = tqdm(total=1.0, desc=f"{'decode':<12}", bar_format=_DECODE_BAR, disable=not progress)
        with timer("video_decode"), bar:
            yield from self.video_decoder.frames(latents, generator, bar=bar if progress else None)


def _configure_bar(pipe: Any, description: str, progress: bool) -> None:
    pipe.set_progress_bar_config(desc=f"{description:<12}", unit="step", bar_format=_BAR, disable=not progress)
