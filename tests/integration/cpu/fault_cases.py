"""Programs that go wrong on some rank, for test_faults. Each runs on every rank; stderr goes to one file a rank."""

import os
import signal
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from layers.attention_backends import default_backend
from layers.parallel_state import ParallelState
from layers.ring import ring_attention
from runner.distributed import Session, start


def run_fault(case: str, culprit: int, folder: str) -> None:
    """Start a session with a ring, leave a half-written file in the folder, and go wrong as `case` says."""
    rank = int(os.environ["RANK"])
    errors = os.open(f"{folder}/stderr{rank}", os.O_WRONLY | os.O_CREAT)
    os.dup2(errors, 2)
    world = int(os.environ["WORLD_SIZE"])
    timeout = timedelta(seconds=2 if case.startswith("absent") else 300)
    with start(ring_degree=world, timeout=timeout) as session:
        Path(folder, f"pid{rank}").write_text(str(os.getpid()))
        half = Path(folder, f"half{rank}.mp4.part")
        half.touch()
        session.on_abort(lambda: half.unlink(missing_ok=True))
        try:
            _go_wrong(case, session, is_culprit=rank == culprit)
        finally:
            half.unlink(missing_ok=True)


def _go_wrong(case: str, session: Session, *, is_culprit: bool) -> None:
    state = session.state
    _pass_around(state)
    if case == "raises":
        if is_culprit:
            raise ValueError("boom in stage 2")
        _pass_around(state)
    elif case == "raises while others wait at a barrier":
        if is_culprit:
            raise ValueError("boom in the decode")
        session.barrier("decode")
    elif case == "killed":
        if is_culprit:
            os.kill(os.getpid(), signal.SIGKILL)
        _pass_around(state)
    elif case == "absent from the ring":
        if is_culprit:
            time.sleep(60)
        _pass_around(state)
    elif case == "absent from point to point":
        if is_culprit:
            time.sleep(60)
        _point_to_point(state)
    elif case == "all stuck":  # in C++, where no Python handler runs; the test sends the signal
        dist.recv(torch.empty(4), (state.rank + 1) % state.world_size)
    elif case == "stuck in a collective":  # the test sends the signal
        if is_culprit:
            session.barrier("never")
        _pass_around(state)
    else:
        raise KeyError(case)


def _pass_around(state: ParallelState) -> None:
    assert state.ring_group is not None
    x = torch.ones(1, 2, 3, 4)
    ring_attention(sdpa_with_lse, x, x, x, valid=[2] * state.ring_degree, group=state.ring_group)


def sdpa_with_lse(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    attend_lse = default_backend(torch.device("cpu"), torch.float32).attend_lse
    assert attend_lse is not None
    return attend_lse(q, k, v)


def _point_to_point(state: ParallelState) -> None:
    sent, got, ranks = torch.ones(4), torch.empty(4), state.sequence_degree
    ops = [
        dist.P2POp(dist.isend, sent, (state.rank + 1) % ranks, group=state.sequence_group),
        dist.P2POp(dist.irecv, got, (state.rank - 1) % ranks, group=state.sequence_group),
    ]
    for work in dist.batch_isend_irecv(ops):
        work.wait()


def run_in_peace() -> dict[str, object]:
    """Objects and tensors from rank 0 to all; a wait three times as long as the timeout of collectives."""
    rank = int(os.environ["RANK"])
    with start(ulysses_degree=2, data_parallel_degree=2, timeout=timedelta(seconds=1)) as session:
        state = session.state
        agreed = session.broadcast_object({"seed": 7} if rank == 0 else None)
        second = session.broadcast_object("next" if rank == 0 else None)
        if rank == 0:
            time.sleep(3)
        session.barrier("decode")
        filled = torch.full((2, 3), float(rank))
        dist.broadcast(filled, src=rank - state.sequence_rank, group=state.sequence_group)
        replicas = torch.tensor([float(rank)])
        dist.all_reduce(replicas, group=state.data_parallel_group)
        report = [agreed, second, filled.tolist(), replicas.item()]
        everyone: list[object] = [None] * 4
        dist.all_gather_object(everyone, report)
    return {"reports": everyone, "group_is_down": not dist.is_initialized()}


if __name__ == "__main__":
    import sys

    run_fault(sys.argv[1], int(sys.argv[2]), sys.argv[3])
