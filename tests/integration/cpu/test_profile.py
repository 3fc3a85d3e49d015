"""--profile under torchrun: one trace a rank, read back."""

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]


def _ranges(path: Path) -> dict[str, list[tuple[float, float]]]:
    """(begin, end) in microseconds of every named range."""
    with gzip.open(path) as file:
        events: list[dict[str, Any]] = json.load(file)["traceEvents"]
    found: dict[str, list[tuple[float, float]]] = {}
    for event in events:
        if event.get("cat") == "user_annotation":
            found.setdefault(event["name"], []).append((event["ts"], event["ts"] + event["dur"]))
    return found


def test_a_trace_of_every_rank(tmp_path: Path) -> None:
    flags = "--model tiny --task t2v --height 256 --width 256 --num_frames 17 --ulysses_degree 2 --use_parallel_vae"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "-m", "runner"]
    command = [
        *torchrun,
        *flags.split(),
        "--profile",
        "--prompt",
        "a cat",
        "a dog",
        "--output_directory",
        str(tmp_path),
    ]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    paths = [tmp_path / f"profile_trace_rank_{rank}.json.gz" for rank in range(2)]
    assert sorted(tmp_path.glob("*.gz")) == paths

    for rank, path in enumerate(paths):
        ranges = _ranges(path)
        stages = ["encode", "stage1", "upsample", "stage2", "video_decode"]
        stages += ["audio_decode", "mux"] if rank == 0 else []
        assert {name: len(ranges.get(name, [])) for name in stages} == dict.fromkeys(stages, 1), (
            "the last request alone"
        )
        for stage, steps in (("stage1", 8), ("stage2", 3)):
            ((begin, end),) = ranges[stage]
            inside = [ranges[f"{stage} step {step + 1}"] for step in range(steps)]
            assert f"{stage} step {steps + 1}" not in ranges
            assert all(len(step) == 1 for step in inside)
            assert all(begin <= step[0][0] <= step[0][1] <= end for step in inside)
            assert [step[0] for step in inside] == sorted(step[0] for step in inside)
        ((begin, end),) = ranges["video_decode"]
        for stage in range(1, 6):
            assert all(begin <= first <= last <= end for first, last in ranges[f"decoder stage {stage}"])

    assert f"{paths[0]} (open at https://ui.perfetto.dev)" in done.stderr
    assert str(paths[1]) not in done.stderr, "rank 0 alone reports"
    table = done.stderr[done.stderr.index("operation (CPU time of its own)") :].splitlines()[1:21]
    assert " aten::" in table[0]
    assert not any(name in line for line in table for name in ranges), "operations, not the ranges around them"
    sidecar = json.loads(next(tmp_path.glob("*_0.json")).read_text())
    assert sidecar["config"]["profile"] is False, "made again without the profiler"
