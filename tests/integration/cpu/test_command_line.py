"""The program as its users start it: whole requests of the tiny model, in one process and under torchrun."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest

ROOT = Path(__file__).parents[3]
PICTURE = str(ROOT / "docs" / "assets" / "demo_cat.jpg")
SIZE = ["--model", "tiny", "--height", "256", "--width", "320", "--num_frames", "17"]
I2V = [*SIZE, "--task", "i2v", "--input_images", PICTURE, "--resize_input_images"]


def _command(ranks: int) -> list[str]:
    if ranks == 1:
        return [sys.executable, "-m", "runner"]
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}", "-m", "runner"]


def _run(*flags: str, ranks: int = 1, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | variables
    return subprocess.run(
        [*_command(ranks), *flags], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
    )


def _probe(path: Path) -> dict[str, Any]:
    with av.open(str(path)) as container:
        video, audio = container.streams.video[0], container.streams.audio[0]
        return {
            "codec": (video.codec_context.name, video.codec_context.pix_fmt, audio.codec_context.name),
            "frames": sum(1 for _ in container.decode(video=0)),
            "size": (video.height, video.width),
            "rate": float(video.average_rate),
            "audio_rate": audio.rate,
            "seconds": (float(video.duration * video.time_base), float(audio.duration * audio.time_base)),
        }


def _frames(folder: Path) -> np.ndarray:
    (path,) = folder.glob("*.mp4")
    with av.open(str(path)) as container:
        return np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])


def test_a_request_and_its_remake(tmp_path: Path) -> None:
    done = _run(*I2V, "--prompt", "a cat", "--num_iterations", "2", "--output_directory", str(tmp_path / "new" / "out"))
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "new" / "out"
    stem = "ltx_2_5_distilled_video_u1r1_tc_False_256x320_i2v_0"
    assert sorted(path.name for path in folder.iterdir()) == [f"{stem}.json", f"{stem}.mp4", "metrics.json"]

    found = _probe(folder / f"{stem}.mp4")
    assert found["codec"] == ("h264", "yuv420p", "aac")
    assert (found["frames"], found["size"], found["rate"], found["audio_rate"]) == (17, (256, 320), 24.0, 48000)
    assert abs(found["seconds"][0] - found["seconds"][1]) <= 1 / 24

    metrics = json.loads((folder / "metrics.json").read_text())
    stages = ("encode", "stage1", "upsample", "stage2", "audio_decode", "video_decode")
    assert len(metrics["iterations"]) == 2
    for sample in metrics["iterations"]:
        assert all(sample[f"{stage}_seconds"] > 0 for stage in stages)
        assert sample["total_seconds"] == pytest.approx(sum(sample[f"{stage}_seconds"] for stage in stages))
        assert sample["peak_memory_bytes"] > 2**20
    assert "mux_seconds" not in metrics["iterations"][0]
    assert metrics["iterations"][1]["mux_seconds"] > 0
    assert metrics["model"]["revision"] == "tiny-v2"
    assert "the picture and the sound are noise" in done.stderr
    sidecar = json.loads((folder / f"{stem}.json").read_text())
    for attention in (metrics["model"]["decoder_attention"], sidecar["model"]["decoder_attention"]):
        assert (attention["requested"], attention["used"], attention["detail"]) == ("auto", "sdpa", "cpu")
        for name in ("natten", "aiter", "triton"):
            line = f"decoder attention: {name} refused: {attention['refused'][name]}"
            assert done.stderr.count(line) == 1
    assert done.stderr.count("decoder attention: using sdpa (cpu)") == 1
    assert "video_decode" in done.stderr, "the closing table"
    assert "Traceback" not in done.stderr

    again = _run("--from_json", str(folder / f"{stem}.json"))
    assert again.returncode == 0, again.stderr
    assert (folder / f"{stem}_1.mp4").read_bytes() == (folder / f"{stem}.mp4").read_bytes()


@pytest.mark.slow
def test_two_ranks_and_two_replicas(tmp_path: Path) -> None:
    """Four processes: two replicas of two ranks, three prompts, files from rank 0 alone."""
    flags = ["--task", "t2v", "--ulysses_degree", "2", "--data_parallel_degree", "2", "--output_directory"]
    done = _run(*SIZE, *flags, str(tmp_path), "--prompt", "a cat", "a dog", "the ocean", ranks=4)
    assert done.returncode == 0, done.stderr
    names = {path.name for path in tmp_path.iterdir()}
    stem = "ltx_2_5_distilled_video_u2r1_tc_False_256x320_t2v"
    assert names == {"metrics.json"} | {f"{stem}_{i}.{suffix}" for i in range(3) for suffix in ("json", "mp4")}
    assert [json.loads((tmp_path / f"{stem}_{i}.json").read_text())["config"]["prompt"] for i in range(3)] == [
        ["a cat"],
        ["a dog"],
        ["the ocean"],
    ]
    metrics = json.loads((tmp_path / "metrics.json").read_text())
    assert metrics["world_size"] == 4
    assert [sample["prompt_index"] for sample in metrics["iterations"]] == [0, 1, 2]
    assert [len(sample["peak_memory_bytes_per_rank"]) for sample in metrics["iterations"]] == [2, 2, 2]
    assert done.stderr.count("loaded tiny") == 1, "rank 0 alone reports"


def test_the_python_in_the_readme_runs(tmp_path: Path) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, timeout=300)
    assert done.returncode == 0, done.stderr
    first, second = (path.read_bytes() for path in sorted(tmp_path.glob("cat_*.mp4")))
    assert first != second


@pytest.mark.slow
def test_compiling_and_its_cache(tmp_path: Path) -> None:
    """Compiled blocks make the same video within rounding, on two ranks; the next process compiles from the disk."""
    flags = [*SIZE, "--task", "t2v", "--prompt", "a cat", "--ulysses_degree", "2", "--output_directory"]
    cache = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor")}
    eager = _run(*flags, str(tmp_path / "eager"), ranks=2)
    assert eager.returncode == 0, eager.stderr
    seconds = []
    for name in ("first", "second"):
        done = _run(*flags, str(tmp_path / name), "--use_torch_compile", ranks=2, **cache)
        assert done.returncode == 0, done.stderr
        assert "compiled the transformer's blocks in" in done.stderr
        seconds.append(json.loads((tmp_path / name / "metrics.json").read_text())["compile_seconds"])
    assert seconds[1] < seconds[0] / 2, seconds
    difference = np.abs(_frames(tmp_path / "eager").astype(int) - _frames(tmp_path / "first").astype(int))
    assert difference.mean() < 0.5, difference.mean()


_REFUSED = [
    (["--height", "250"], "--height 250 is below the minimum of 256"),
    (["--num_frames", "120"], "--num_frames 120 is not 8*k+1; the nearest valid counts are 113 and 121."),
    (["--input_images", "nothing.png"], "--input_images nothing.png"),
    (["--output_directory", "/proc/nowhere"], "--output_directory /proc/nowhere cannot be written"),
    (["--attention_backend", "AITER"], "--attention_backend AITER is not available here"),
    (["--decoder_attention", "aiter"], "--decoder_attention aiter cannot be used here: "),
    (["--ulysses_degree", "2"], "--ulysses_degree 2"),
]


@pytest.mark.parametrize(("flags", "message"), _REFUSED, ids=lambda value: value[0] if isinstance(value, list) else "")
def test_what_the_user_can_mend_is_one_line(flags: list[str], message: str, tmp_path: Path) -> None:
    picture = [] if "--input_images" in flags else ["--input_images", PICTURE]
    base = [*SIZE, "--task", "i2v", *picture, "--prompt", "a cat", "--output_directory", str(tmp_path / "out")]
    done = _run(*base, "--resize_input_images", *flags)
    assert done.returncode == 2, done.stderr
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stderr.count("error: ") == 1


@pytest.mark.parametrize(
    "number",
    [
        signal.SIGKILL,
        pytest.param(signal.SIGTERM, marks=pytest.mark.slow),
        pytest.param(signal.SIGINT, marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_goes_takes_the_run_with_it(number: signal.Signals, tmp_path: Path) -> None:
    """Kill one rank as soon as the first video is saved, while the second is made: all end, nothing half-written."""
    prompts = [f"a cat {index}" for index in range(20)]
    command = [*_command(2), *SIZE, "--task", "t2v", "--ulysses_degree", "2", "--output_directory", str(tmp_path)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [*command, "--prompt", *prompts],
        cwd=ROOT,
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # ignored in a suite run in the background
    )
    try:
        _wait_for(lambda: list(tmp_path.glob("*_0.json")), 120)
        ranks = _children(process.pid)
        os.kill(ranks[-1], number)
        started = time.monotonic()
        _, stderr = process.communicate(timeout=60)
        assert time.monotonic() - started < 30
    finally:
        process.kill()
    assert process.returncode != 0
    assert not [pid for pid in ranks if Path(f"/proc/{pid}").exists()]
    assert "metrics.json" not in {path.name for path in tmp_path.iterdir()}
    assert not list(tmp_path.glob(".*")), "no partial file"
    assert stderr.count("rank 1: ") == 1, "the cause, once, with its rank"


def _wait_for(condition: Any, seconds: float) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.1)


def _children(pid: int) -> list[int]:
    """The ranks: processes whose parent is torchrun."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == pid:
            found.append(int(stat.parent.name))
    return sorted(found)
