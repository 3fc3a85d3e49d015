"""What a request may ask for, also without the command line."""

from dataclasses import replace

import pytest
from PIL import Image

from runner_models.api import VideoRequest
from runner_models.ltx2.limits import MAX_PROMPT_TOKENS, request_problems
from runner_models.ltx2.pipeline import Ltx2Model
from runner_models.ltx2.recipes import DISTILLED

GOOD = VideoRequest(
    prompt="a",
    negative_prompt="",
    image=None,
    height=256,
    width=320,
    num_frames=17,
    frame_rate=24.0,
    num_inference_steps=8,
    guidance_scale=1.0,
    max_sequence_length=1024,
    seed=1,
)


def test_a_good_request_has_no_problem() -> None:
    assert not list(request_problems(GOOD, DISTILLED))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_frames": 18}, "--num_frames 18 is not 8*k+1; the nearest valid counts are 17 and 25."),
        ({"height": 288}, "--height 288 is not a multiple of 64"),
        ({"num_inference_steps": 3}, "--num_inference_steps 3 is not allowed"),
        ({"max_sequence_length": 2**20}, f"the nearest valid is {MAX_PROMPT_TOKENS}."),
        ({"image": Image.new("RGB", (100, 300))}, "the image is 100x300 (width x height) and the video 320x256."),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_generate_refuses_instead_of_correcting(changes: dict, message: str) -> None:
    """diffusers floors a frame count, ignores steps beside sigmas, and stretches an image, without a word."""
    model = object.__new__(Ltx2Model)
    model.recipe = DISTILLED
    with pytest.raises(ValueError) as caught:  # noqa: PT011  # the message is compared below
        model.generate(replace(GOOD, **changes))
    assert message in str(caught.value)
