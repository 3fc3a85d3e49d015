"""A rank killed in the middle of requests on two GPUs: under NCCL or RCCL, too, everything ends within 30 s."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from ranks import free_port

LIMIT_S = 30
START_LIMIT_S = 120


def _ranks(launcher: int) -> dict[int, int]:
    """Process ids of torchrun's children by rank."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            if parent != launcher:
                continue
            environment = dict(item.partition("=")[::2] for item in (folder / "environ").read_text().split("\0"))
        except OSError:
            continue
        if "RANK" in environment:
            found[int(environment["RANK"])] = int(folder.name)
    return found


@pytest.mark.accelerator
@pytest.mark.multi_gpu
@pytest.mark.parametrize("culprit", [0, 1], ids=["store host", "other rank"])
def test_all_end(culprit: int, tmp_path: Path) -> None:
    out, log = tmp_path / "out", tmp_path / "log"
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", f"--master_port={free_port()}"]
    command += ["-m", "runner", "--model", "tiny", "--task", "t2v", "--prompt", "a cat", "--ulysses_degree", "2"]
    command += ["--use_parallel_vae", "--height", "256", "--width", "256", "--num_frames", "17"]
    command += ["--num_iterations", "10000", "--output_directory", str(out)]
    with log.open("w") as file:
        launcher = subprocess.Popen(command, stdout=file, stderr=file)
    try:
        end = time.monotonic() + START_LIMIT_S
        while "loaded tiny" not in log.read_text():
            assert launcher.poll() is None, log.read_text()[-2000:]
            assert time.monotonic() < end, log.read_text()[-2000:]
            time.sleep(0.2)
        time.sleep(5)  # the first requests compile kernels, later ones follow each other
        ranks = _ranks(launcher.pid)
        assert set(ranks) == {0, 1}
        os.kill(ranks[culprit], signal.SIGKILL)
        began = time.monotonic()
        assert launcher.wait(timeout=LIMIT_S) != 0
        left = [pid for pid in ranks.values() if Path(f"/proc/{pid}").exists()]
        assert not left, f"processes {left} still run {time.monotonic() - began:.0f} s after rank {culprit} was killed"
    finally:
        if launcher.poll() is None:
            launcher.kill()
    assert not list(out.glob("*.mp4"))
