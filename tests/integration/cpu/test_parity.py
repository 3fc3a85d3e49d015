"""The whole request against the stock diffusers pipelines called by hand with the same noise, fp32, CPU.

Tolerances, relative L2: 1e-5 for latents and waveform. Both sides run the same kernels in the same order, so the figure
allows for nothing but a different order of sums; a dropped argument or a swapped draw is off by 1e-2 or more.
"""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from compare_reference import GUIDANCE_OFF
from diffusers import (
    LTX2ImageToVideoPipeline,
    LTX2LatentUpsamplePipeline,
    LTX2Pipeline,
    LTX2VideoDiffusionDecoderModel,
    LTX2VideoTransformer3DModel,
)
from diffusers.pipelines.ltx2 import LTX2LatentUpsamplerModel
from diffusers.pipelines.ltx2.pipeline_ltx2_diffusion_decode import LTX2VideoDiffusionDecodePipeline
from diffusers.pipelines.ltx2.utils import DISTILLED_SIGMA_VALUES, STAGE_2_DISTILLED_SIGMA_VALUES
from PIL import Image

from layers.neighborhood_attention import neighborhood_attention_sdpa
from runner_models import load_model
from runner_models.ltx2.attention import NeighborhoodAttnProcessor
from runner_models.ltx2.pipeline import Ltx2Model

TOLERANCE = 1e-5
SIZE = {"height": 256, "width": 320, "num_frames": 17}
PROMPT = "a cat dancing in the rain"


def _picture() -> Image.Image:
    y, x = np.mgrid[: SIZE["height"], : SIZE["width"]]
    return Image.fromarray(np.stack([x % 256, y % 256, (x + y) % 256], -1).astype(np.uint8))


def _relative_l2(got: torch.Tensor, want: torch.Tensor) -> float:
    assert got.shape == want.shape
    return ((got.double() - want.double()).norm() / want.double().norm()).item()


def _stock(folder: Path, *, full: bool, image: Image.Image | None, prompt: str, seed: int) -> dict[str, torch.Tensor]:
    """Latents, pixels (0..1) and waveform of the stock pipelines; only the decoder's attention is not theirs."""
    transformer = LTX2VideoTransformer3DModel.from_pretrained(
        folder, subfolder="transformer_full" if full else "transformer"
    )
    base = LTX2Pipeline.from_pretrained(folder, transformer=transformer)
    pipe = base if image is None else LTX2ImageToVideoPipeline(**base.components)
    pipe.set_progress_bar_config(disable=True)
    generator = torch.Generator().manual_seed(seed)
    common = {"prompt": prompt, "frame_rate": 24.0, "generator": generator, "output_type": "latent"}
    common |= {} if image is None else {"image": image}
    if full:
        pipe.scheduler = type(pipe.scheduler).from_config(
            pipe.scheduler.config, use_dynamic_shifting=True, shift_terminal=0.1
        )
        options = {"num_inference_steps": 3, "negative_prompt": "rain", "spatio_temporal_guidance_blocks": [1]}
        video, audio = pipe(**SIZE, **common, **options, return_dict=False)
    else:
        half = SIZE | {"height": SIZE["height"] // 2, "width": SIZE["width"] // 2}
        video, audio = pipe(**half, sigmas=DISTILLED_SIGMA_VALUES, **common, **GUIDANCE_OFF, return_dict=False)
        upsampler = LTX2LatentUpsamplerModel.from_pretrained(folder, subfolder="latent_upsampler")
        upsample = LTX2LatentUpsamplePipeline(vae=pipe.vae, latent_upsampler=upsampler)
        video = upsample(latents=video, output_type="latent", return_dict=False)[0]
        video, audio = pipe(
            **SIZE,
            sigmas=STAGE_2_DISTILLED_SIGMA_VALUES,
            noise_scale=STAGE_2_DISTILLED_SIGMA_VALUES[0],
            latents=video,
            audio_latents=audio,
            **common,
            **GUIDANCE_OFF,
            return_dict=False,
        )
    decoder = LTX2VideoDiffusionDecoderModel.from_pretrained(folder, subfolder="diffusion_decoder")
    decoder.set_attn_processor(NeighborhoodAttnProcessor(neighborhood_attention_sdpa))
    decode = LTX2VideoDiffusionDecodePipeline(diffusion_decoder=decoder, scheduler=pipe.scheduler)
    pixels = decode(video, generator=generator, output_type="np", denormalize=False, return_dict=False)[0]
    with torch.no_grad():
        wave = pipe.vocoder(pipe.audio_vae.decode(audio, return_dict=False)[0])
    return {"video": video, "audio": audio, "pixels": torch.from_numpy(pixels), "wave": wave}


def _ours(model: Ltx2Model, monkeypatch: pytest.MonkeyPatch, **changes: object) -> dict[str, torch.Tensor]:
    """The same four, caught on their way through `Ltx2Model.generate`."""
    caught: dict[str, torch.Tensor] = {}
    decode_video, decode_audio = model._decode_video, model._decode_audio

    def catch_video(latents: torch.Tensor, *rest: object) -> torch.Tensor:
        caught["video"] = latents
        return decode_video(latents, *rest)

    def catch_audio(latents: torch.Tensor) -> torch.Tensor:
        caught["audio"] = latents
        return decode_audio(latents)

    monkeypatch.setattr(model, "_decode_video", catch_video)
    monkeypatch.setattr(model, "_decode_audio", catch_audio)
    output = model.generate(replace(model.request(PROMPT, **SIZE), **changes))
    return caught | {"frames": output.all_frames(), "wave": output.audio}


@pytest.mark.parametrize("task", ["t2v", "i2v"])
@pytest.mark.parametrize("variant", ["distilled", "full"])
def test_equals_the_stock_pipelines(
    variant: str, task: str, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = variant == "full"
    image = _picture() if task == "i2v" else None
    want = _stock(tiny_folder, full=full, image=image, prompt=PROMPT, seed=7)
    model = load_model("tiny-full" if full else "tiny")
    steps = {"num_inference_steps": 3} if full else {}
    got = _ours(model, monkeypatch, image=image, seed=7, negative_prompt="rain", **steps)
    assert _relative_l2(got["video"], want["video"]) <= TOLERANCE
    assert _relative_l2(got["audio"], want["audio"]) <= TOLERANCE
    assert _relative_l2(got["wave"], want["wave"][0]) <= TOLERANCE
    # Bytes: equal but for values that sit on a rounding edge.
    difference = (got["frames"].float() - (want["pixels"][0] * 255).round().float()).abs()
    assert difference.max() <= 1
    assert (difference > 0).float().mean() < 1e-4


@pytest.fixture
def latents_only(monkeypatch: pytest.MonkeyPatch) -> Ltx2Model:
    """A tiny model whose decoders hand the latents through: seconds instead of a minute where they add nothing."""
    model = load_model("tiny")
    monkeypatch.setattr(model, "_decode_video", lambda latents, *_: latents)
    monkeypatch.setattr(model, "_decode_audio", lambda latents: latents)
    return model


def test_every_input_reaches_the_output(latents_only: Ltx2Model) -> None:
    """The parity above would hold if both sides dropped an input: each must move the video and the sound."""
    base = latents_only.request(PROMPT, max_sequence_length=128, **SIZE)
    plain = latents_only.generate(base)
    for change in ({"seed": 8}, {"prompt": "waves at night"}, {"image": _picture()}):
        moved = latents_only.generate(replace(base, **change))
        assert _relative_l2(moved.frames, plain.frames) > 0.02, change
        assert _relative_l2(moved.audio, plain.audio) > 0.02, change
    slower = latents_only.generate(replace(base, frame_rate=12.0))
    assert _relative_l2(slower.frames, plain.frames) > 0.02
    assert slower.audio.shape[2] == pytest.approx(2 * plain.audio.shape[2], abs=1)


def test_requests_do_not_see_each_other(latents_only: Ltx2Model) -> None:
    first, second = latents_only.request(PROMPT, **SIZE), latents_only.request("waves at night", **SIZE)
    together = [latents_only.generate(request) for request in (first, second)]
    fresh = load_model("tiny")
    fresh._decode_video = latents_only._decode_video
    fresh._decode_audio = latents_only._decode_audio
    alone = fresh.generate(second)
    assert torch.equal(together[1].frames, alone.frames)
    assert torch.equal(together[1].audio, alone.audio)
    assert torch.equal(latents_only.generate(first).frames, together[0].frames), "the same seed twice is the same video"
