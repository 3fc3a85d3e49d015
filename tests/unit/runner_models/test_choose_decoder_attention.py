"""The decoder's attention for a checkpoint: its kernels and grids, and what a user can mend."""

import logging

import pytest
import torch
from diffusers import LTX2VideoDiffusionDecoderModel

from layers.neighborhood_attention import neighborhood_attention_sdpa
from layers.neighborhood_attention.select import CHOICES, Selection
from runner.flags import FLAGS
from runner_models.api import SetupError
from runner_models.ltx2.attention import NeighborhoodAttnProcessor
from runner_models.ltx2.build import component_config
from runner_models.ltx2.decoder_attention import DISABLE_VARIABLE, decoder_grids, select_decoder_attention


def select(requested: str = "auto") -> Selection:
    return select_decoder_attention(
        requested,
        component_config("diffusion_decoder"),
        device=torch.device("cpu"),
        dtype=torch.float32,
        everywhere=lambda value: [value],
    )


def test_the_flag_takes_what_the_selection_takes() -> None:
    assert tuple(FLAGS["decoder_attention"].choices or ()) == CHOICES
    assert FLAGS["decoder_attention"].default == "auto"


def test_the_released_decoder() -> None:
    target = select().target
    assert target.kernel_sizes == ((3, 7, 7), (3, 5, 5), (11, 11, 11))
    assert (target.head_dim, target.arch) == (64, "cpu")


@pytest.mark.parametrize("name", ["natten", "aiter", "triton"])
def test_a_named_one_that_cannot_be_used_is_a_setup_error(name: str) -> None:
    with pytest.raises(SetupError, match=rf"^--decoder_attention {name} cannot be used here: .* this is a CPU\. Leave"):
        select(name)


def test_disabled_by_a_variable(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "layers")
    monkeypatch.setenv(DISABLE_VARIABLE, "natten, triton")
    assert select().refused["triton"] == "disabled by the user"
    assert "decoder attention: natten refused: disabled by the user" in [r.getMessage() for r in caplog.records]
    with pytest.raises(SetupError, match="natten cannot be used here: disabled by the user"):
        select("natten")
    for value in ("flex", "sdpa"):
        monkeypatch.setenv(DISABLE_VARIABLE, value)
        with pytest.raises(SetupError, match=f"LTX_RUNNER_DISABLE_ATTENTION={value} may name natten, aiter, triton"):
            select()


def test_grids_are_those_of_the_decode() -> None:
    """Counted while the stock decoder runs; its small depths differ between stages."""
    config = component_config(
        "diffusion_decoder",
        {
            "decoder_stage_channels": [128, 64, 64, 64, 64],
            "decoder_stage_depths": [1, 2, 1, 1, 2],
            "decoder_stage_kernels": [[3, 3, 3], [3, 3, 3], [3, 5, 5], [3, 5, 5]],
            "decoder_stage5_kernel": [3, 5, 7],
            "decoder_upsample_channel_reductions": [2, 1, 1, 1],
            "decoder_t_emb_dim": 32,
        },
    )
    decoder = LTX2VideoDiffusionDecoderModel.from_config(
        {key: value for key, value in config.items() if key != "_class_name"}
    ).eval()
    calls = []

    def counting(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kernel_size: tuple[int, int, int]) -> torch.Tensor:
        calls.append((kernel_size, tuple(q.shape[1:4]), q.shape[4]))
        return neighborhood_attention_sdpa(q, k, v, kernel_size)

    decoder.set_attn_processor(NeighborhoodAttnProcessor(counting))  # type: ignore[arg-type]
    with torch.no_grad():
        decoder.decode(torch.randn(1, 128, 3, 3, 4), generator=torch.Generator().manual_seed(0))
    grids = decoder_grids(config, height=96, width=128, num_frames=17)
    assert calls == [(grid.kernel_size, grid.shape, grid.heads) for grid in grids for _ in range(grid.blocks)]
