"""Whole requests on the tiny checkpoint: every rank count gives the latents of the stock pipelines in one process."""

from typing import Any

import pytest
from pipeline_cases import check_requests
from ranks import run_ranks

# Largest difference over the standard deviation, fp32: the order of sums, through 8 + 3 steps or through guidance.
# Measured: 1.9e-6 distilled, 7.0e-6 full with 3 steps.
TOLERANCE = 1e-5

DISTILLED = {"height": 256, "width": 256, "num_frames": 17}
ODD = {"height": 576, "width": 960, "num_frames": 97}  # 1,755 tokens in stage 1
FULL = {"height": 224, "width": 256, "num_frames": 17, "num_inference_steps": 2}


@pytest.mark.parametrize(
    ("world", "model", "degrees", "changes"),
    [
        pytest.param(2, "tiny-full", [(2, 1)], FULL, id="full-u2r1"),
        pytest.param(4, "tiny", [(2, 2)], DISTILLED, id="distilled-u2r2"),
        pytest.param(2, "tiny", [(2, 1), (1, 2)], DISTILLED, id="distilled-2-ranks", marks=pytest.mark.slow),
        pytest.param(3, "tiny", [(1, 3)], ODD, id="distilled-1755-tokens-u1r3", marks=pytest.mark.slow),
        pytest.param(4, "tiny-full", [(2, 2), (1, 4), (4, 1)], FULL, id="full-4-ranks", marks=pytest.mark.slow),
    ],
)
def test_same_video_on_every_rank_count(
    world: int, model: str, degrees: list[tuple[int, int]], changes: dict[str, Any]
) -> None:
    found = run_ranks(check_requests, world, model, degrees, changes)
    assert len(found) == 2 * len(degrees)
    for request, differences in found.items():
        assert differences["video"] <= TOLERANCE, request
        assert differences["audio"] <= TOLERANCE, request
