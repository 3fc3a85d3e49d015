"""to_uint8 against diffusers' VideoProcessor, bit for bit."""

import pytest
import torch
from diffusers.video_processor import VideoProcessor

from runner_models.ltx2.pixels import to_uint8


def reference(video: torch.Tensor) -> torch.Tensor:
    pixels = VideoProcessor(vae_scale_factor=32).postprocess_video(video.float(), "np")
    return torch.from_numpy((pixels * 255).round().astype("uint8"))


def random_video(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return (torch.randn(*shape, generator=generator) * 0.8).to(dtype)  # a fifth lies outside [-1, 1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("chunk_bytes", [1, 2 * 3 * 9 * 7 * 4 * 3, 2**26], ids=["frame", "uneven", "whole"])
def test_equals_diffusers(dtype: torch.dtype, chunk_bytes: int) -> None:
    video = random_video(2, 3, 5, 9, 7, dtype=dtype)
    before = video.clone()
    out = to_uint8(video, chunk_bytes=chunk_bytes)
    assert out.dtype == torch.uint8
    assert out.is_contiguous()
    assert torch.equal(out, reference(video))
    assert torch.equal(video, before), "the input was changed"


def test_every_rounding_border() -> None:
    """All 256 levels, and the halves between them, where a different order of operations would show."""
    levels = torch.arange(0, 255.5, 0.5) / 255 * 2 - 1
    video = levels.view(1, 1, 1, 1, -1).expand(1, 3, 1, 1, -1)
    assert torch.equal(to_uint8(video), reference(video))
    assert to_uint8(video)[0, 0, 0, ::2, 0].tolist() == list(range(256))


def test_non_contiguous_and_extreme() -> None:
    video = random_video(1, 6, 4, 7, 9)[:, ::2].transpose(3, 4)
    video[0, 0, 0, 0, :3] = torch.tensor([float("inf"), float("-inf"), 1e30])
    assert torch.equal(to_uint8(video), reference(video))
    assert to_uint8(video)[0, 0, 0, :3, 0].tolist() == [255, 0, 255]


@pytest.mark.parametrize(
    "video",
    [torch.zeros(3, 5, 8, 8), torch.zeros(1, 5, 3, 8, 8), torch.zeros(1, 3, 5, 8, 8, dtype=torch.uint8)],
    ids=["4d", "frames-first", "uint8"],
)
def test_bad_input(video: torch.Tensor) -> None:
    with pytest.raises(ValueError, match=r"expected float \(B, 3, F, H, W\)"):
        to_uint8(video)
