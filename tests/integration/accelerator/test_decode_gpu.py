"""The exact decode on a GPU against the stock untiled one with the same attention: bf16, whole, in chunks, as bytes."""

from typing import Any

import pytest
import torch

from layers.neighborhood_attention import na3d_flash_attn
from layers.parallel_state import ParallelState
from runner_models.ltx2.attention import NeighborhoodAttnProcessor
from runner_models.ltx2.build import build_component, component_config
from runner_models.ltx2.decoder.exact import ExactDecoder
from runner_models.ltx2.decoder.options import DecodeOptions
from runner_models.ltx2.decoder.video import VideoDecoder
from runner_models.ltx2.pixels import to_uint8

pytestmark = pytest.mark.accelerator

TOLERANCE = 1.5e-2
"""Relative L2 in bf16; a window or a position off by one is at 1e-1."""


@pytest.fixture(scope="module")
def model() -> Any:
    overrides = {
        "decoder_stage_channels": [256, 128, 64, 64, 64],
        "decoder_stage_depths": [2, 2, 2, 2, 3],
        "decoder_upsample_channel_reductions": [2, 2, 1, 1],
        "decoder_t_emb_dim": 64,
    }
    torch.manual_seed(0)
    config = component_config("diffusion_decoder", overrides)
    built: Any = build_component("diffusion_decoder", config, device="cuda", dtype=torch.bfloat16)
    built.set_attn_processor(NeighborhoodAttnProcessor(na3d_flash_attn))
    return built


@pytest.fixture(scope="module")
def latents() -> torch.Tensor:
    return torch.randn(1, 128, 5, 8, 9, generator=torch.Generator().manual_seed(1)).to("cuda", torch.bfloat16)


def _generator() -> torch.Generator:
    return torch.Generator("cuda").manual_seed(2)


@pytest.fixture(scope="module")
def wanted(model: Any, latents: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return model.decode(latents, generator=_generator(), return_dict=False)[0]


@pytest.mark.parametrize("chunk", [8, 16, None], ids=str)
def test_equals_stock(chunk: int | None, model: Any, latents: torch.Tensor, wanted: torch.Tensor) -> None:
    decoder = ExactDecoder(model, attention=na3d_flash_attn)
    got = torch.cat(list(decoder.decode(latents, generator=_generator(), chunk_frames=chunk)), 1).transpose(1, 2)
    assert got.shape == wanted.shape
    assert ((got.float() - wanted.float()).norm() / wanted.float().norm()).item() <= TOLERANCE


def test_bytes_on_the_host(model: Any, latents: torch.Tensor, wanted: torch.Tensor) -> None:
    options = DecodeOptions(streaming=True, chunk_frames=8)
    state = ParallelState(device=torch.device("cuda", 0))
    decoder = VideoDecoder(model, None, attention=na3d_flash_attn, options=options, state=state)
    got = torch.cat(list(decoder.frames(latents, _generator())))
    want = to_uint8(wanted)[0].cpu()
    assert got.device.type == "cpu"
    difference = (got.float() - want.float()).norm() / want.float().norm()
    assert difference.item() <= TOLERANCE
