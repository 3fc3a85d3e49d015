"""The released checkpoint, where there is one: LTX_WEIGHTS names its folder."""

import os
from pathlib import Path

import av
import numpy as np
import pytest

from runner.__main__ import main

pytestmark = [pytest.mark.accelerator, pytest.mark.weights]


def test_the_picture_is_no_noise(tmp_path: Path) -> None:
    """Neighbouring pixels of a real video are alike; those of random weights are not."""
    line = ["--task", "t2v", "--height", "512", "--width", "768", "--num_frames", "17", "--prompt", "a calm blue sea"]
    assert main(["--model", os.environ["LTX_WEIGHTS"], *line, "--output_directory", str(tmp_path)]) == 0
    (path,) = tmp_path.glob("*.mp4")
    with av.open(str(path)) as container:
        frames = np.stack([frame.to_ndarray(format="gray") for frame in container.decode(video=0)]).astype(float)
    across = np.abs(np.diff(frames, axis=2)).mean() / frames.std()
    assert across < 0.3
