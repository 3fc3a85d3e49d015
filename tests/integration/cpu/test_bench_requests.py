"""bench_e2e.py and bench_multi_gpu.sh as their users start them, on the tiny model."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
TINY = ["--model", "tiny", "--height", "256", "--width", "256", "--num_frames", "17", "--num_iterations", "1"]
STAGES = ["encode", "stage1", "upsample", "stage2", "audio_decode", "video_decode", "mux"]
VIDEO_TOKENS = [48] * 8 + [192] * 3


def _run(command: list[str], **variables: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHON": sys.executable} | variables
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=500)


def _check_row(row: dict[str, Any]) -> None:
    assert row["work"]["transformer_video_tokens"] == VIDEO_TOKENS
    assert row["runs"] == len(row["to_file_seconds"]) == 1
    assert sorted(row["stages"]) == sorted(STAGES)
    assert all(stage["median_seconds"] > 0 for stage in row["stages"].values())
    total = sum(stage["median_seconds"] for name, stage in row["stages"].items() if name != "mux")
    assert row["median_seconds"] == pytest.approx(total)
    assert row["to_file_seconds"][0] > row["median_seconds"] * 0.9


def test_one_request_and_a_peer_that_is_not_there(tmp_path: Path) -> None:
    out = tmp_path / "new" / "e2e.json"
    command = [sys.executable, "scripts/bench_e2e.py", *TINY, "--variants", "ours", "xfuser", "--out", str(out)]
    done = _run(command)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert json.loads(out.read_text()) == result
    ours, xfuser = result["rows"]
    _check_row(ours)
    assert ours["chosen"]["video_decode"]["method"] == "exact"
    assert ours["work"]["decoder_queries"] > 0
    assert "xfuser" in xfuser["error"].lower() or "accelerator" in xfuser["error"].lower(), "says why"
    assert "median_seconds" not in xfuser
    assert result["command"][:2] == ["python", "scripts/bench_e2e.py"]
    assert all(result[name] for name in ("device", "versions", "commit", "date", "weights_gib", "load_seconds"))
    assert xfuser["error"] in done.stdout.splitlines()[-2]


@pytest.mark.slow
def test_stock_and_fallbacks_do_the_same_work(tmp_path: Path) -> None:
    variants = ["ours", "stock", "ours:vae_decode=tiled,decoder_attention=sdpa", "ours:decode_chunk_frames=8"]
    done = _run([sys.executable, "scripts/bench_e2e.py", *TINY, "--in_turn", "--variants", *variants])
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout.splitlines()[-1])["rows"]
    assert [row["variant"] for row in rows] == variants
    for row in rows:
        _check_row(row)
        assert row["work"].get("latents_relative_l2", 0.0) < 1e-5
    # At this size the stock decoder has one tile: the whole clip.
    assert len({row["work"]["decoder_queries"] for row in rows}) == 1


@pytest.mark.slow
def test_two_ranks_and_the_time_that_is_up() -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    flags = ["--ulysses_degree", "2", "--use_parallel_vae", "--variants", "ours", "stock"]
    done = _run([*torchrun, "scripts/bench_e2e.py", *TINY, *flags])
    assert done.returncode == 0, done.stderr
    ours, stock = json.loads(done.stdout.splitlines()[-1])["rows"]
    _check_row(ours)
    assert len(ours["peak_gib_per_rank"]) == 2
    assert "one rank" in stock["error"]
    done = _run([*torchrun, "scripts/bench_e2e.py", *TINY, *flags, "--seconds", "1"])
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["rows"][0]["cut_short"] is True


def _sweep(*flags: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return _run(["bash", "scripts/bench_multi_gpu.sh", *flags], **variables)


def test_the_sweep_lists_and_refuses(tmp_path: Path) -> None:
    done = _sweep("--dry", "--ranks", "1 4", "--out", str(tmp_path), "--model", "tiny")
    assert done.returncode == 0, done.stderr
    names = [line.split()[2].removeprefix(f"{tmp_path}/").removesuffix(":") for line in done.stdout.splitlines()]
    assert names[:2] == ["e2e_1_whole.json", "e2e_1_chunks.json"]
    assert "e2e_4_u2r2_pvae.json" in names
    assert len(set(names)) == len(names) == 9
    assert "--nproc_per_node=4 scripts/bench_e2e.py --ulysses_degree 4 --use_parallel_vae --model tiny" in done.stdout
    assert not list(tmp_path.iterdir()), "a listing writes nothing"
    (tmp_path / "flags.txt").write_text("--model tiny\n")
    done = _sweep("--dry", "--ranks", "1", "--out", str(tmp_path), "--model", "other")
    assert (done.returncode, done.stdout) == (2, "")
    assert "holds rows of other flags (--model tiny)" in done.stderr


@pytest.mark.parametrize(
    ("flags", "part"),
    [
        (["--ranks", "1 b"], "--ranks b is not a count of 1 or more"),
        (["--ranks", "0"], "--ranks 0 is not a count of 1 or more"),
        (["--ranks", "1.5"], "--ranks 1.5 is not a count of 1 or more"),
        (["--ranks=1"], "--ranks and its value are two words"),
        (["--settings", "("], "--settings ( is not a regular expression"),
        (["--settings", "u9"], "--settings u9 matches none of: whole chunks"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else None,
)
def test_a_sweep_that_cannot_be(flags: list[str], part: str, tmp_path: Path) -> None:
    done = _sweep("--dry", "--ranks", "1", "--out", str(tmp_path), *flags)
    assert (done.returncode, done.stdout) == (2, "")
    assert f"error: {part}" in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.slow
def test_the_sweep_goes_on_where_it_stopped(tmp_path: Path) -> None:
    flags = ["--out", str(tmp_path), "--settings", "^(whole|u2_pvae)$", "--ranks", "1 2", *TINY]
    finished = tmp_path / "e2e_1_whole.json"
    finished.write_text("precious")
    failed = _sweep(*flags, LTX_RUNNER_DISABLE_ATTENTION="nonsense")
    assert failed.returncode == 1
    assert "failed   " in failed.stdout
    assert sorted(path.name for path in tmp_path.glob("*.json")) == ["e2e_1_whole.json"]
    done = _sweep(*flags)
    assert done.returncode == 0, done.stdout
    assert finished.read_text() == "precious"
    row = json.loads((tmp_path / "e2e_2_u2_pvae.json").read_text())
    assert row["ranks"] == 2
    _check_row(row["rows"][0])
    again = _sweep(*flags)
    assert again.stdout.splitlines() == [f"done     {tmp_path}/e2e_{n}.json" for n in ("1_whole", "2_u2_pvae")]
