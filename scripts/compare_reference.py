"""The two videos of compare_videos.py --against_reference: the runner's, and the stock diffusers pipelines'.

Both are the distilled request on the tiny checkpoint with one seed, encoded by the same writer. Of the stock side one
thing is not diffusers': the decoder's attention is tiled SDPA, because the stock FlexAttention path needs gigabytes of
mask even at 256x256x17.
"""

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
GUIDANCE_OFF = {
    "guidance_scale": 1.0,
    "stg_scale": 0.0,
    "modality_scale": 1.0,
    "guidance_rescale": 0.0,
    "audio_guidance_scale": 1.0,
    "audio_stg_scale": 0.0,
    "audio_modality_scale": 1.0,
    "audio_guidance_rescale": 0.0,
}
"""The distilled model is run without guidance; the stock pipelines' defaults are those of the full one."""


class RenderFailed(RuntimeError):
    """The runner ended with an error; its own last lines are the message."""


@dataclass(frozen=True)
class Request:
    """Sizes in pixels and frames; `image` is a file, and makes the task i2v."""

    prompt: str
    height: int
    width: int
    num_frames: int
    seed: int
    image: str | None = None
    frame_rate: float = 24.0


def render_runner(request: Request, folder: Path, *, ranks: int, flags: list[str]) -> Path:
    """Run `python -m runner`, under torchrun with more than one rank, and return its mp4.

    Raises:
        RenderFailed: it did not end with 0.
    """
    start = [sys.executable, "-m"]
    if ranks > 1:
        start += ["torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}", "-m"]
        flags = ["--ulysses_degree", str(ranks), *flags]
    command = [*start, "runner", "--model", "tiny", "--task", "i2v" if request.image else "t2v"]
    command += ["--prompt", request.prompt, "--seed", str(request.seed), "--output_directory", str(folder)]
    for name in ("height", "width", "num_frames", "frame_rate"):
        command += [f"--{name}", str(getattr(request, name))]
    if request.image:
        command += ["--input_images", str(Path(request.image).resolve()), "--resize_input_images"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    before = set(folder.glob("*.mp4"))
    done = subprocess.run([*command, *flags], env=environment, capture_output=True, text=True)
    if done.returncode:
        # Under torchrun the program's own lines stand before those of the launcher.
        own = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
        words = "\n".join(own) or done.stderr.strip()[-2000:]
        raise RenderFailed(f"python -m runner ended with {done.returncode}: {words}")
    (path,) = set(folder.glob("*.mp4")) - before
    return path


def render_stock(request: Request, path: Path) -> Path:
    """The stock two-stage pipelines, fp32 on the CPU, written to `path`."""
    import torch
    from diffusers import (
        LTX2ImageToVideoPipeline,
        LTX2LatentUpsamplePipeline,
        LTX2Pipeline,
        LTX2VideoDiffusionDecoderModel,
    )
    from diffusers.pipelines.ltx2 import LTX2LatentUpsamplerModel
    from diffusers.pipelines.ltx2.pipeline_ltx2_diffusion_decode import LTX2VideoDiffusionDecodePipeline
    from diffusers.pipelines.ltx2.utils import DISTILLED_SIGMA_VALUES, STAGE_2_DISTILLED_SIGMA_VALUES

    from layers.neighborhood_attention import neighborhood_attention_sdpa
    from runner.media import VideoWriter, load_image
    from runner_models.ltx2.attention import NeighborhoodAttnProcessor
    from runner_models.ltx2.tiny import tiny_checkpoint

    folder = tiny_checkpoint()
    pipe = LTX2Pipeline.from_pretrained(folder)
    generator = torch.Generator().manual_seed(request.seed)
    common = {"prompt": request.prompt, "frame_rate": request.frame_rate, "generator": generator, **GUIDANCE_OFF}
    common |= {"num_frames": request.num_frames, "output_type": "latent", "return_dict": False}
    if request.image:
        pipe = LTX2ImageToVideoPipeline(**pipe.components)
        common["image"] = load_image(request.image, height=request.height, width=request.width, resize=True)
    pipe.set_progress_bar_config(disable=True)
    video, audio = pipe(height=request.height // 2, width=request.width // 2, sigmas=DISTILLED_SIGMA_VALUES, **common)
    upsampler = LTX2LatentUpsamplerModel.from_pretrained(folder, subfolder="latent_upsampler")
    upsample = LTX2LatentUpsamplePipeline(vae=pipe.vae, latent_upsampler=upsampler)
    upsample.set_progress_bar_config(disable=True)
    video = upsample(latents=video, output_type="latent", return_dict=False)[0]
    video, audio = pipe(
        height=request.height,
        width=request.width,
        sigmas=STAGE_2_DISTILLED_SIGMA_VALUES,
        noise_scale=STAGE_2_DISTILLED_SIGMA_VALUES[0],
        latents=video,
        audio_latents=audio,
        **common,
    )
    decoder = LTX2VideoDiffusionDecoderModel.from_pretrained(folder, subfolder="diffusion_decoder")
    decoder.set_attn_processor(NeighborhoodAttnProcessor(neighborhood_attention_sdpa))
    decode = LTX2VideoDiffusionDecodePipeline(diffusion_decoder=decoder, scheduler=pipe.scheduler)
    decode.set_progress_bar_config(disable=True)
    pixels = decode(video, generator=generator, output_type="np", denormalize=False, return_dict=False)[0]
    with torch.inference_mode():
        wave = pipe.vocoder(pipe.audio_vae.decode(audio, return_dict=False)[0])
    with VideoWriter(
        path,
        height=request.height,
        width=request.width,
        frame_rate=request.frame_rate,
        audio=wave[0],
        audio_sample_rate=pipe.vocoder.config.output_sampling_rate,
    ) as writer:
        writer.write(torch.from_numpy(pixels[0] * 255).round().to(torch.uint8))
    return path
