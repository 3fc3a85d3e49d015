"""compare_videos.py on small mp4s that the project's writer makes, called as the command calls it.

H.264 at crf 12 keeps a smooth picture within about 45 dB of what was written; a fault planted here is far below 40.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import compare_measures
import compare_videos
import numpy as np
import pytest
import torch
from diffusers.models.autoencoders.ltx2_diffusion_decoder import _tile_intervals
from PIL import Image

from runner.media import VideoWriter

ROOT = Path(__file__).parents[3]
HEIGHT, WIDTH, FRAMES, RATE = 128, 160, 5, 48000
TILES = ["--tile", "80", "--stride", "64"]
"""One border on either axis, at 64."""


def _picture() -> np.ndarray:
    """(F, H, W, 3) smooth waves that move."""
    y, x, t = np.ogrid[:HEIGHT, :WIDTH, :FRAMES]
    waves = [127 + 90 * np.sin(x / a + t / 3) * np.cos(y / b) for a, b in ((9, 14), (12, 10), (15, 9))]
    return np.rint(np.stack(waves, -1)).astype(np.uint8).transpose(2, 0, 1, 3)


def _sound(seconds: float = FRAMES / 24) -> torch.Tensor:
    t = torch.arange(round(seconds * RATE)) / RATE
    return torch.stack([(t * 440 * 6.283).sin(), (t * 660 * 6.283).sin()]) * 0.5


def _write(path: Path, frames: np.ndarray, audio: torch.Tensor | None = None, **changes: Any) -> Path:
    options = {"height": frames.shape[1], "width": frames.shape[2], "frame_rate": 24, "audio_sample_rate": RATE}
    with VideoWriter(path, audio=audio, **(options | changes)) as writer:
        writer.write(torch.from_numpy(np.ascontiguousarray(frames)))
    return path


def _compare(
    capsys: pytest.CaptureFixture[str], folder: Path, *arguments: str | Path
) -> tuple[int, dict[str, Any] | None, str]:
    """Exit code, the last line, stderr."""
    code = compare_videos.main([*map(str, arguments), "--output-directory", str(folder / "out")])
    out, err = capsys.readouterr()
    return code, json.loads(out.splitlines()[-1]) if out else None, err


@pytest.fixture
def original(tmp_path: Path) -> Path:
    return _write(tmp_path / "a.mp4", _picture(), _sound())


def test_a_video_equals_itself(original: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, result, _ = _compare(capsys, tmp_path, original, original, *TILES, "--max-seam", "1.01")
    assert code == 0
    assert result is not None
    assert (result["equal_frames"], result["min_psnr_db"], result["min_ssim"]) == (FRAMES, None, 1.0)
    assert result["audio"]["equal"]
    assert result["worst_seam"] == 1.0
    assert result["passed"]


def test_the_measures_are_those_of_a_known_difference(
    original: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Four grey levels everywhere are 10*log10(255**2 / 16) dB; the coding adds noise of its own."""
    other = _write(tmp_path / "b.mp4", _picture() + 4, _sound() * 0.9)
    code, result, err = _compare(capsys, tmp_path, original, other)
    assert code == 1
    assert result is not None
    assert result["mean_psnr_db"] == pytest.approx(36.1, abs=1.2)
    assert result["min_ssim"] > 0.98
    assert result["audio"]["snr_db"] == pytest.approx(20, abs=1)
    assert "below --min_psnr 40" in err
    assert "below --min_audio_snr 30" in err
    assert "SSIM" not in err
    code, *_ = _compare(capsys, tmp_path, original, other, "--min_psnr", "30", "--min_audio_snr", "10")
    assert code == 0


def test_a_shift_by_one_pixel_fails(original: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = _write(tmp_path / "b.mp4", np.roll(_picture(), 1, axis=2), _sound())
    code, result, err = _compare(capsys, tmp_path, original, other)
    assert code == 1
    assert "--min_psnr 40" in err
    assert result is not None
    assert result["min_psnr_db"] < 35


@pytest.mark.parametrize(("axis", "name"), [(1, "rows"), (2, "columns")])
def test_a_seam_is_found_where_it_is(
    axis: int, name: str, original: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Beyond line 64 all is six grey levels lighter, which is 35 dB: what a good encoder loses."""
    frames = _picture()
    frames[(slice(None),) * axis + (slice(64, None),)] += 6
    other = _write(tmp_path / "b.mp4", frames, _sound())
    code, result, err = _compare(capsys, tmp_path, original, other, *TILES, "--min_psnr", "30", "--max_seam", "2")
    assert code == 1
    assert "a tile border differs" in err
    assert result is not None
    across = result["seams"]["columns" if name == "rows" else "rows"]
    step = result["seams"][name]["largest_step"]
    assert abs(step["at"] - 64) <= 1
    assert step["ratio"] > 3
    assert across["largest_step"]["ratio"] < step["ratio"], "coding noise alone"
    lines = json.loads((tmp_path / "out" / "comparison.json").read_text())["lines"][name]
    assert np.mean(lines[66:]) > 2 * np.mean(lines[:62])


def test_the_pictures(original: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The third frame alone is spoilt: the sheet shows that one, as both files hold it."""
    frames = _picture()
    frames[2, 20:60, 20:60] = 255
    other = _write(tmp_path / "b.mp4", frames, _sound())
    _, result, _ = _compare(capsys, tmp_path, original, other)
    assert result is not None
    assert result["worst_frame"] == 2
    sheet = np.asarray(Image.open(tmp_path / "out" / "worst_frame.png"))
    assert sheet.shape == (HEIGHT + 24, 3 * WIDTH + 16, 3)
    assert sheet[24 + 40, 40].mean() < 250
    assert sheet[24 + 40, WIDTH + 8 + 40].mean() > 250
    assert sheet[24 + 40, 2 * (WIDTH + 8) + 40].mean() > 60, "the difference is there"
    assert sheet[24 + 90, 2 * (WIDTH + 8) + 150].mean() < 10, "and nowhere else"
    assert Image.open(tmp_path / "out" / "seam_profile.png").width > 1000


def test_what_cannot_be_compared_says_why(original: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sound = _sound()
    broken = tmp_path / "broken.mp4"
    broken.write_bytes(original.read_bytes()[: original.stat().st_size // 2])
    text = tmp_path / "text.mp4"
    text.write_text("not a video")
    cases = {
        tmp_path / "nothing.mp4": "nothing.mp4 is not a file",
        text: "cannot be read as a video",
        broken: "Invalid data",
        _write(tmp_path / "small.mp4", _picture()[:, :64], sound): f"{WIDTH}x{HEIGHT} and ",
        _write(tmp_path / "short.mp4", _picture()[:4], sound): "has 5 frames and",
        _write(tmp_path / "fast.mp4", _picture(), sound, frame_rate=25): "24 frames per second and",
        _write(tmp_path / "mute.mp4", _picture()): "mute.mp4 has no sound",
        _write(tmp_path / "other.mp4", _picture(), sound, audio_sample_rate=44100): "at 48000 Hz and",
    }
    for path, words in cases.items():
        code, result, err = _compare(capsys, tmp_path, original, path)
        assert (code, result) == (2, None), path
        assert words in err, path
    code, result, _ = _compare(capsys, tmp_path, original, tmp_path / "mute.mp4", "--ignore_audio")
    assert code == 0
    assert result is not None
    assert result["audio"] is None


@pytest.mark.parametrize(
    "flags", [[], ["one.mp4"], ["a.mp4", "b.mp4", "--against_reference"], ["a", "b", "--tile", "9"]]
)
def test_wrong_command_lines(flags: list[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        compare_videos.main(flags)
    assert stop.value.code == 2


@pytest.mark.parametrize(
    ("flags", "part"),
    [
        (["a", "b", "--min_psnr", "nan"], "argument --min_psnr: nan is not a finite number"),
        (["a", "b", "--max-seam", "inf"], "argument --max_seam: inf is not a finite number"),
        (["--against_reference", "--ranks", "0"], "argument --ranks: 0 is not an integer of 1 or more"),
        (["--against_reference", "--runner_flags", '"a'], '--runner_flags "a cannot be split into words'),
        (["--against_reference", "--runner_flags=--dry-run"], "--runner_flags cannot have --dry_run"),
        (["--against_reference", "--runner_flags=--seed=3"], "--runner_flags cannot have --seed"),
    ],
)
def test_values_that_would_pass_anything(flags: list[str], part: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        compare_videos.main(flags)
    assert stop.value.code == 2
    assert part in capsys.readouterr().err


def test_a_runner_that_fails_under_torchrun(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    said = "W1201 launcher\nerror: --seed -1 is out of range\nTraceback\n====\n"
    failed = subprocess.CompletedProcess([], 1, "", said)
    monkeypatch.setattr(subprocess, "run", lambda *args, **kwargs: failed)
    code, result, err = _compare(capsys, tmp_path, "--against_reference", "--ranks", "2")
    assert (code, result) == (2, None)
    assert err.splitlines()[-1] == "python -m runner ended with 1: error: --seed -1 is out of range"


@pytest.mark.parametrize("length", [256, 768, 769, 832, 1024, 1408, 1440, 1472, 1536, 2176])
def test_borders_are_those_of_the_stock_tiles(length: int) -> None:
    cell, size = 8, (768, 704, 48)
    intervals = _tile_intervals(length // cell, *(pixels // cell for pixels in size))
    if length % cell == 0:
        assert compare_measures.tile_borders(length) == [start * cell for start, _ in intervals[1:]]


@pytest.mark.slow
def test_the_runner_against_the_stock_pipelines(tmp_path: Path) -> None:
    """As a user calls it, from another folder, on two ranks.

    Two ranks round otherwise than one, by a grey level here and there, and H.264 makes 45 dB of that in such noise.
    """
    command = [sys.executable, str(ROOT / "scripts" / "compare_videos.py"), "--against-reference"]
    size = ["--height", "256", "--width", "320", "--input_images", str(ROOT / "docs" / "assets" / "demo_cat.jpg")]
    done = subprocess.run(
        [*command, *size, "--ranks", "2", "--output_directory", "found"],
        cwd=tmp_path, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["num_frames"] == 17
    refused = subprocess.run(
        [*command, "--num_frames", "18", "--output_directory", "found"],
        cwd=tmp_path, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert refused.returncode == 2
    assert "--num_frames 18 is not 8*k+1" in refused.stderr
