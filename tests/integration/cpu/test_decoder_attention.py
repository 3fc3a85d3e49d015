"""The decoder's attention against stock diffusers: the whole decoder with our processor and with FlexAttention.

Small kernels and a small grid, because the stock mask grows with the square of the tokens: 9,792 here.
"""

import torch
from diffusers import LTX2VideoDiffusionDecoderModel

from layers.neighborhood_attention import neighborhood_attention_sdpa
from runner_models.ltx2.attention import NeighborhoodAttnProcessor
from runner_models.ltx2.build import component_config

TOLERANCE = 1e-5
"""Relative L2, fp32: both sides are exact, only the order of sums differs. A window off by one is at 1e-1."""


def _decoder() -> LTX2VideoDiffusionDecoderModel:
    torch.manual_seed(0)
    config = component_config(
        "diffusion_decoder",
        {
            "decoder_stage_channels": [128, 64, 64, 64, 64],
            "decoder_stage_depths": [1, 1, 1, 1, 2],
            "decoder_stage_kernels": [[3, 3, 3], [3, 5, 5], [3, 5, 5], [3, 5, 5]],
            "decoder_upsample_channel_reductions": [2, 1, 1, 1],
            "decoder_stage5_kernel": [3, 5, 7],
            "decoder_t_emb_dim": 32,
        },
    )
    config.pop("_class_name")
    return LTX2VideoDiffusionDecoderModel.from_config(config).eval()


@torch.no_grad()
def test_equals_the_stock_processor() -> None:
    decoder = _decoder()
    latents = torch.randn(1, 128, 3, 3, 3, generator=torch.Generator().manual_seed(1))

    def decode() -> torch.Tensor:
        return decoder.decode(latents, generator=torch.Generator().manual_seed(2), return_dict=False)[0]

    want = decode()
    decoder.set_attn_processor(NeighborhoodAttnProcessor(neighborhood_attention_sdpa))
    got = decode()
    assert got.shape == (1, 3, 17, 96, 96)
    assert ((got - want).norm() / want.norm()).item() <= TOLERANCE

    def shifted(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kernel: tuple[int, int, int]) -> torch.Tensor:
        return neighborhood_attention_sdpa(q, k.roll(1, dims=3), v.roll(1, dims=3), kernel)

    decoder.set_attn_processor(NeighborhoodAttnProcessor(shifted))
    assert ((decode() - want).norm() / want.norm()).item() > 1e-2, "a window off by one must be seen"
