"""The stock diffusers pipelines, used as diffusers' documentation of LTX-2.5 does: distilled, two stages, one process.

The decoder is the stock one in its overlapping tiles, with tiled SDPA in place of diffusers' FlexAttention, whose block
mask needs 167 GiB on a 69x64x96 grid.
"""

from pathlib import Path
from typing import Any

import torch
from diffusers import LTX2ImageToVideoPipeline, LTX2LatentUpsamplePipeline, LTX2Pipeline
from diffusers.pipelines.ltx2.pipeline_ltx2_diffusion_decode import LTX2VideoDiffusionDecodePipeline
from diffusers.pipelines.ltx2.utils import DISTILLED_SIGMA_VALUES, STAGE_2_DISTILLED_SIGMA_VALUES

from layers.neighborhood_attention import neighborhood_attention_sdpa
from peers.peer import Made
from peers.sharing import share_parts
from peers.work import NestedClock, TimedCalls
from runner.config import RunConfig
from runner.distributed import Session
from runner.media import VideoWriter
from runner_models.api import SetupError, VideoRequest
from runner_models.ltx2.attention import NeighborhoodAttnProcessor
from runner_models.ltx2.load import Parts


class StockPipelines:
    """A `peers.peer.Peer`."""

    compile_seconds: float | None = None

    def __init__(self, parts: Parts, config: RunConfig, request: VideoRequest, session: Session, *, tile: bool) -> None:
        """Raises SetupError for what the stock pipelines do not do."""
        if session.state.world_size > 1:
            raise SetupError("the stock pipelines run on one rank")
        if not config.recipe.distilled or config.use_torch_compile:
            raise SetupError("the stock peer runs the distilled model, without torch.compile")
        parts = share_parts(parts)
        self.request, self.device = request, session.state.device
        self.transformer, self.decoder = parts.pipeline.transformer, parts.diffusion_decoder
        self.decoder.set_attn_processor(NeighborhoodAttnProcessor(neighborhood_attention_sdpa))
        if tile:
            self.decoder.enable_tiling()
        kind = LTX2Pipeline if request.image is None else LTX2ImageToVideoPipeline
        pipe = kind(**parts.pipeline.components)
        pipe.set_progress_bar_config(disable=True)
        upsample = LTX2LatentUpsamplePipeline(vae=pipe.vae, latent_upsampler=parts.latent_upsampler)
        decode = LTX2VideoDiffusionDecodePipeline(diffusion_decoder=self.decoder, scheduler=pipe.scheduler)
        self._pipe = TimedCalls(
            pipe, self._now, lambda given: "stage2" if "latents" in given else "stage1", prompts=True
        )
        self._upsample = TimedCalls(upsample, self._now, lambda given: "upsample")
        self._decode = TimedCalls(decode, self._now, lambda given: "video_decode")
        self._clock = NestedClock(self.device)

    def _now(self) -> NestedClock:
        return self._clock

    @torch.inference_mode()
    def generate(self, clock: NestedClock) -> Made:
        """See Peer."""
        self._clock, request = clock, self.request
        shared: dict[str, Any] = {
            "prompt": request.prompt,
            "num_frames": request.num_frames,
            "frame_rate": request.frame_rate,
            "max_sequence_length": request.max_sequence_length,
            "generator": torch.Generator(self.device).manual_seed(request.seed),
            "output_type": "latent",
            "return_dict": False,
            "guidance_scale": 1.0,
            "modality_scale": 1.0,
            "stg_scale": 0.0,
            "audio_guidance_scale": 1.0,
            "audio_modality_scale": 1.0,
            "audio_stg_scale": 0.0,
        }
        if request.image is not None:
            shared["image"] = request.image
        half = {"height": request.height // 2, "width": request.width // 2}
        video, audio = self._pipe(sigmas=DISTILLED_SIGMA_VALUES, **half, **shared)
        video = self._upsample(latents=video, output_type="latent", return_dict=False)[0]
        video, audio = self._pipe(
            latents=video,
            audio_latents=audio,
            sigmas=STAGE_2_DISTILLED_SIGMA_VALUES,
            noise_scale=STAGE_2_DISTILLED_SIGMA_VALUES[0],
            height=request.height,
            width=request.width,
            **shared,
        )
        options = {"generator": shared["generator"], "denormalize": False, "output_type": "np", "return_dict": False}
        frames = self._decode(video, **options)[0][0]
        with clock("audio_decode"):
            mel = self._pipe.audio_vae.decode(audio.to(self._pipe.audio_vae.dtype), return_dict=False)[0]
            waveform = self._pipe.vocoder(mel)[0].float().cpu()
        return Made(frames, waveform, int(self._pipe.vocoder.config.output_sampling_rate))

    def save(self, made: Made, directory: Path) -> Path:
        """By our writer: diffusers' own has other settings, which take other times."""
        path = directory / "stock.mp4"
        with VideoWriter(
            path,
            height=self.request.height,
            width=self.request.width,
            frame_rate=self.request.frame_rate,
            audio=made.audio,
            audio_sample_rate=made.audio_sample_rate,
        ) as writer:
            writer.write(made.bytes())
        return path

    def latents(self) -> torch.Tensor:
        """See Peer."""
        return self._decode.given[0]

    def describe(self) -> dict[str, Any]:
        """See Peer."""
        return {"decoder_attention": "sdpa", "video_decode": "tiled" if self.decoder.use_tiling else "whole"}

    def close(self) -> None:
        """See Peer."""
