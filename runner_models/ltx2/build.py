"""LTX-2.5 components from configs alone, with random weights: the tiny checkpoint and `--load_format dummy`.

`configs/*.json` hold the production architecture, one file a component. The transformer, VAE and decoder figures are
those of the released checkpoint as diffusers 0.42 defaults carry them; connectors follow the LTX-2.3 repository, the
text encoder is Gemma 4 12B. Parameter counts agree with the released sizes (19.0 B, 417 M, 11.9 B).
"""

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

CONFIGS = Path(__file__).parent / "configs"

COMPONENTS = (
    "text_encoder",
    "connectors",
    "transformer",
    "vae",
    "latent_upsampler",
    "diffusion_decoder",
    "audio_vae",
    "vocoder",
)

PARAMETERS: dict[str, int] = {
    "text_encoder": 11_907_350_272,
    "connectors": 3_172_227_584,
    "transformer": 18_987_859_200,
    "vae": 726_105_969,
    "latent_upsampler": 497_867_904,
    "diffusion_decoder": 417_133_616,
    "audio_vae": 53_248_146,
    "vocoder": 128_537_448,
}
"""Parameters of each production component, so that memory can be estimated without building anything."""


def component_config(name: str, overrides: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The production config of one component, with `overrides` applied; a key it does not have is an error."""
    config = json.loads((CONFIGS / f"{name}.json").read_text())
    unknown = set(overrides or {}) - set(config)
    assert not unknown, f"{name} has no config {sorted(unknown)}"
    return config | dict(overrides or {})


def build_component(
    name: str, config: Mapping[str, Any], *, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
) -> torch.nn.Module:
    """A component with PyTorch's default random weights, created in `dtype` on `device`: no copy on the host."""
    config = {key: value for key, value in config.items() if key != "_class_name"}
    # The vocoder computes filters as it is built, which bf16 would spoil: 129 M parameters, cast afterwards.
    with _creating_on(torch.device(device), torch.float32 if name == "vocoder" else dtype):
        if name == "text_encoder":
            from transformers import Gemma4UnifiedConfig, Gemma4UnifiedForConditionalGeneration, Gemma4UnifiedTextConfig

            # The multimodal token ids must stay integers, so the towers are dropped and not the ids.
            gemma = Gemma4UnifiedConfig(
                text_config=Gemma4UnifiedTextConfig(**config), vision_config=None, audio_config=None
            )
            module = Gemma4UnifiedForConditionalGeneration(gemma)
        else:
            module = _diffusers_class(component_config(name)["_class_name"]).from_config(config)
    if name == "vocoder":
        fill_stft(module)
        torch.nn.Module.to(module, dtype)  # diffusers' own .to() warns about a list of modules that is empty
    return module.eval().requires_grad_(False)


@contextmanager
def _creating_on(device: torch.device, dtype: torch.dtype) -> Iterator[None]:
    previous = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            yield
    finally:
        torch.set_default_dtype(previous)


def _diffusers_class(name: str) -> Any:
    import diffusers
    import diffusers.pipelines.ltx2

    return getattr(diffusers, name, None) or getattr(diffusers.pipelines.ltx2, name)


def make_scheduler(*, full: bool) -> Any:
    """The flow-matching scheduler; the full model shifts its schedule with the token count."""
    from diffusers import FlowMatchEulerDiscreteScheduler

    overrides = {"use_dynamic_shifting": True, "shift_terminal": 0.1} if full else {}
    config = component_config("scheduler", overrides)
    config.pop("_class_name")
    return FlowMatchEulerDiscreteScheduler(**config)


def fill_stft(vocoder: Any) -> None:
    """Give the vocoder's STFT and mel buffers their real values; diffusers leaves zeros until weights are loaded.

    Windowed Fourier basis and triangular mel filters (HTK mel scale), in fp32.
    """
    config = vocoder.config
    bins = config.filter_length // 2 + 1
    n = torch.arange(config.filter_length, dtype=torch.float32)[None]
    angle = 2 * math.pi * torch.arange(bins, dtype=torch.float32)[:, None] * n / config.filter_length
    window = torch.hann_window(config.window_length, dtype=torch.float32)
    basis = torch.cat([angle.cos(), -angle.sin()]) * window
    stft = vocoder.mel_stft.stft_fn
    stft.forward_basis.copy_(basis[:, None])
    stft.inverse_basis.copy_(basis[:, None] / config.filter_length)

    frequency = torch.linspace(0, config.input_sampling_rate / 2, bins, dtype=torch.float32)
    top = 2595 * math.log10(1 + config.input_sampling_rate / 2 / 700)
    edges = 700 * (10 ** (torch.linspace(0, top, config.num_mel_channels + 2, dtype=torch.float32) / 2595) - 1)
    low, centre, high = edges[:-2, None], edges[1:-1, None], edges[2:, None]
    rising, falling = (frequency - low) / (centre - low), (high - frequency) / (high - centre)
    vocoder.mel_stft.mel_basis.copy_(torch.minimum(rising, falling).clamp(min=0))
