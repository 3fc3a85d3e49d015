"""Whole requests of the tiny model on a GPU, through the command line."""

import json
from pathlib import Path

import av
import numpy as np
import pytest
import torch

from runner.__main__ import main

pytestmark = pytest.mark.accelerator

LINE = "--task t2v --height 256 --width 320 --num_frames 17 --seed 3 --device cuda --model".split()


def _frames(path: Path) -> np.ndarray:
    with av.open(str(path)) as container:
        return np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])


def _run(folder: Path, *flags: str) -> tuple[Path, dict]:
    code = main([*LINE, *flags, "--prompt", "a cat dancing in the rain", "--output_directory", str(folder)])
    assert code == 0
    (video,) = folder.glob("*.mp4")
    return video, json.loads((folder / "metrics.json").read_text())


@pytest.mark.parametrize("model", ["tiny", "tiny-full"])
def test_a_gpu_makes_the_same_file_twice(model: str, tmp_path: Path) -> None:
    steps = ["--num_inference_steps", "3"] if model == "tiny-full" else []
    first, metrics = _run(tmp_path / "a", model, *steps)
    second, _ = _run(tmp_path / "b", model, *steps)
    assert first.read_bytes() == second.read_bytes()
    assert metrics["model"]["dtype"] == "bfloat16"
    assert metrics["device"] == torch.cuda.get_device_name()
    assert metrics["iterations"][0]["peak_memory_bytes"] > 2**20


def test_offloading_changes_nothing(tmp_path: Path) -> None:
    plain, _ = _run(tmp_path / "plain", "tiny", "--dtype", "fp32")
    offloaded, _ = _run(tmp_path / "offloaded", "tiny", "--dtype", "fp32", "--enable_model_cpu_offload")
    difference = np.abs(_frames(plain).astype(int) - _frames(offloaded).astype(int))
    assert difference.mean() < 0.5


def test_bf16_is_close_to_fp32(tmp_path: Path) -> None:
    """The tiny model differs by 1.1 % in pixels on a CPU; a stage left in the wrong dtype would crash or drift."""
    half, _ = _run(tmp_path / "bf16", "tiny")
    full, _ = _run(tmp_path / "fp32", "tiny", "--dtype", "fp32")
    a, b = _frames(half).astype(float), _frames(full).astype(float)
    assert np.linalg.norm(a - b) / np.linalg.norm(b) < 0.10
