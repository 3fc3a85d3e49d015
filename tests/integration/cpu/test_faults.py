"""One rank fails, all end: within seconds, with a non-zero code, the cause printed once, nothing half-written left."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from fault_cases import run_fault, run_in_peace
from ranks import free_port, run_ranks, start_ranks

WORLD = 3
LIMIT_S = 30


def _codes(processes: list[Any], limit_s: float = LIMIT_S) -> list[int]:
    end = time.monotonic() + limit_s
    for process in processes:
        process.join(timeout=max(0.0, end - time.monotonic()))
    hung = [rank for rank, process in enumerate(processes) if process.is_alive()]
    for rank in hung:
        processes[rank].kill()
    assert not hung, f"ranks {hung} still run after {limit_s} s"
    return [process.exitcode for process in processes]


def _said(folder: Path) -> str:
    return "".join(path.read_text() for path in sorted(folder.glob("stderr*")))


def _causes(said: str) -> int:
    return len(re.findall(r"^rank \d+: ", said, flags=re.M))


@pytest.mark.parametrize("culprit", [0, 2], ids=["store host", "other rank"])
@pytest.mark.parametrize(
    ("case", "cause"),
    [
        ("raises", "ValueError: boom in stage 2"),
        ("raises while others wait at a barrier", "ValueError: boom in the decode"),
    ],
)
def test_rank_raises(case: str, cause: str, culprit: int, tmp_path: Path) -> None:
    processes, _ = start_ranks(run_fault, WORLD, case, culprit, str(tmp_path))
    assert _codes(processes) == [1] * WORLD
    said = _said(tmp_path)
    assert said.count(f"rank {culprit}: {cause}") == 1
    assert _causes(said) == 1, said
    assert not list(tmp_path.glob("*.part"))


@pytest.mark.parametrize("culprit", [0, 2], ids=["store host", "other rank"])
def test_rank_killed(culprit: int, tmp_path: Path) -> None:
    processes, _ = start_ranks(run_fault, WORLD, "killed", culprit, str(tmp_path))
    codes = _codes(processes)
    assert codes[culprit] == -signal.SIGKILL
    assert all(code == 1 for rank, code in enumerate(codes) if rank != culprit)
    said = _said(tmp_path)
    assert said.count(f"rank {culprit}: process") == 1, said
    assert "died without an error message" in said or "is gone" in said
    assert _causes(said) == 1, said
    survivors = {f"half{rank}.mp4.part" for rank in range(WORLD) if rank != culprit}
    assert not survivors & {path.name for path in tmp_path.glob("*.part")}


@pytest.mark.parametrize(
    ("case", "number"),
    [
        ("stuck in a collective", signal.SIGTERM),
        ("stuck in a collective", signal.SIGINT),
        pytest.param("all stuck", signal.SIGTERM, marks=pytest.mark.slow),
    ],
)
def test_signal_while_stuck(case: str, number: signal.Signals, tmp_path: Path) -> None:
    processes, _ = start_ranks(run_fault, WORLD, case, 1, str(tmp_path))
    _wait_for(lambda: len(list(tmp_path.glob("half*"))) == WORLD)
    time.sleep(1)
    for process in processes:
        os.kill(process.pid, number)
    codes = _codes(processes)
    assert all(codes), codes
    said = _said(tmp_path)
    assert _causes(said) == 1, said
    assert "SIGTERM" in said or "interrupted" in said or "SIGINT" in said
    assert not list(tmp_path.glob("*.part"))


@pytest.mark.parametrize("case", ["absent from the ring", "absent from point to point"])
def test_groups_honour_the_timeout(case: str, tmp_path: Path) -> None:
    processes, _ = start_ranks(run_fault, WORLD, case, 1, str(tmp_path))
    assert _codes(processes) == [1] * WORLD
    assert "timed out" in _said(tmp_path).lower()


def test_waiting_has_no_time_limit_and_broadcasts_arrive() -> None:
    found = run_ranks(run_in_peace, 4)
    assert found["group_is_down"]
    for rank, (agreed, second, filled, replicas) in enumerate(found["reports"]):
        leader = 2 * (rank // 2)
        assert agreed == {"seed": 7}
        assert second == "next"
        assert filled == [[float(leader)] * 3] * 2
        assert replicas == {0: 2.0, 1: 4.0}[rank % 2]


@pytest.mark.slow
@pytest.mark.parametrize("case", ["raises", "killed"])
def test_under_torchrun(case: str, tmp_path: Path) -> None:
    began = time.monotonic()
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(WORLD)]
    command += ["--master_port", str(free_port()), str(Path(__file__).with_name("fault_cases.py"))]
    done = subprocess.run([*command, case, "1", str(tmp_path)], capture_output=True, text=True, timeout=120)
    assert done.returncode != 0
    said = _said(tmp_path)
    cause = "rank 1: ValueError: boom" if case == "raises" else "rank 1: process"
    assert said.count(cause) == 1, said + done.stderr
    assert "rank 0:" not in said
    assert "rank 2:" not in said
    assert not (set(tmp_path.glob("*.part")) - {tmp_path / "half1.mp4.part"})
    assert time.monotonic() - began < LIMIT_S + 15


def _wait_for(condition: Any, limit_s: float = 60) -> None:
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.1)
