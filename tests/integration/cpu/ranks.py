"""Run a function on several gloo ranks of this machine and bring back what rank 0 returns."""

import multiprocessing
import os
import signal
import socket
import time
import traceback
from collections.abc import Callable
from queue import Empty
from typing import Any

# A server that has imported the heavy packages once and forks the ranks: 0.1 s a rank instead of 5.
_PRELOAD = ["torch", "yunchang", "torch._dynamo", "runner.distributed", "runner_models.ltx2.transformer"]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def rank_environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    """What torchrun would set."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
    }


def _child(function: Callable[..., Any], rank: int, world_size: int, port: int, queue: Any, args: Any) -> None:
    import torch

    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a suite started in the background ignores it
    os.environ.update(rank_environment(rank, world_size, port))
    try:
        result = function(*args)
    except Exception:
        queue.put((rank, None, traceback.format_exc()))
        raise
    if rank == 0:
        queue.put((rank, result, None))


def start_ranks(function: Callable[..., Any], world_size: int, *args: Any) -> tuple[list[Any], Any]:
    """Start the ranks; their processes and the queue that results and tracebacks come by."""
    import torch

    # On a GPU machine some of these packages touch CUDA as they are imported, and CUDA does not survive a fork.
    context: Any = multiprocessing.get_context("spawn" if torch.cuda.is_available() else "forkserver")
    if not torch.cuda.is_available():
        context.set_forkserver_preload(_PRELOAD)
    port, queue = free_port(), context.Queue()
    processes = [
        context.Process(target=_child, args=(function, rank, world_size, port, queue, args), daemon=True)
        for rank in range(world_size)
    ]
    for process in processes:
        process.start()
    return processes, queue


def run_ranks(function: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = 300) -> Any:
    """Rank 0's result once every rank has ended well; an AssertionError with the traceback of the first that failed."""
    processes, queue = start_ranks(function, world_size, *args)
    end = time.monotonic() + timeout_s
    try:
        while True:
            try:
                _, result, trace = queue.get(timeout=0.2)
            except Empty:
                assert time.monotonic() < end, f"{world_size} ranks did not finish in {timeout_s} s"
                codes = [p.exitcode for p in processes]
                assert not any(codes), f"ranks ended with {codes}"
                continue
            assert trace is None, trace
            break
        for process in processes:
            process.join(timeout=max(1, end - time.monotonic()))
        codes = [process.exitcode for process in processes]
        late = [] if not any(codes) else [trace for _, _, trace in _drain(queue) if trace]
        assert codes == [0] * world_size, f"ranks ended with {codes}\n" + "\n".join(late)
        return result
    finally:
        for process in processes:
            process.join(timeout=5)
            if process.is_alive():
                process.kill()


def _drain(queue: Any) -> list[tuple[int, Any, str | None]]:
    found = []
    try:
        while True:
            found.append(queue.get(timeout=0.2))
    except Empty:
        return found
