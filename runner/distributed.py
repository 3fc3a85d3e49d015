"""Process groups up and down, waiting without a time limit, and one end for all ranks when one of them fails.

Waiting for one rank's long work (a download, a decode) goes through the store: no collective, so no timeout to hit.
How the ranks end together is in runner/watchdog.py.
"""

import base64
import logging
import os
import pickle
import signal
import threading
import traceback
from collections.abc import Callable, Mapping
from datetime import timedelta
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from layers.parallel_state import ParallelState, check_degrees
from runner.watchdog import Launch, Watchdog, exit_on_signal, poll

log = logging.getLogger(__name__)

DEFAULT_TIMEOUT = timedelta(minutes=10)
CONNECT_TIMEOUT = timedelta(seconds=30)

Describe = Callable[[BaseException], tuple[str, int]]


def describe_failure(error: BaseException) -> tuple[str, int]:
    """(text to print after "rank N: ", exit code): a line, then the traceback unless it is an interruption."""
    if isinstance(error, KeyboardInterrupt):
        return "interrupted", 130
    if isinstance(error, SystemExit):
        code = error.code if isinstance(error.code, int) else 1
        return (f"stopped by {signal.Signals(code - 128).name}" if code > 128 else f"exited with {error.code}"), code
    return f"{type(error).__name__}: {error}\n{''.join(traceback.format_exception(error)).rstrip()}", 1


def start(
    *,
    ulysses_degree: int = 1,
    ring_degree: int = 1,
    data_parallel_degree: int = 1,
    device: str = "cpu",
    timeout: timedelta = DEFAULT_TIMEOUT,
    describe: Describe = describe_failure,
    environ: Mapping[str, str] = os.environ,
) -> "Session":
    """Join the world that the environment describes. Use it as a context manager, from the main thread.

    With one process there is no group, no store and no thread. `device` is "cpu" (gloo) or "cuda" (NCCL or RCCL, and
    gloo for CPU tensors); rank i takes cuda:LOCAL_RANK. `timeout` bounds every collective on every group. Raises
    ValueError, before anything is started, for degrees that do not fit the world.
    """
    launch = Launch.from_environment(environ)
    degrees = {"ulysses_degree": ulysses_degree, "ring_degree": ring_degree}
    degrees["data_parallel_degree"] = data_parallel_degree
    check_degrees(world_size=launch.world_size, **degrees)
    where = torch.device("cpu") if device == "cpu" else torch.device(device.split(":")[0], launch.local_rank)
    if launch.world_size == 1:
        return Session(ParallelState(device=torch.device(device)), None, describe)
    if where.type == "cuda":
        torch.cuda.set_device(where)
    base, own = _connect(launch), _connect(launch, second=True)
    watchdog = Watchdog(launch, own)
    watchdog.start()
    try:
        dist.init_process_group(
            "gloo" if where.type == "cpu" else "cpu:gloo,cuda:nccl",
            store=dist.PrefixStore(f"{launch.run}/groups", base),
            rank=launch.rank,
            world_size=launch.world_size,
            timeout=timeout,
            device_id=where if where.type == "cuda" else None,
        )
        state = build_state(launch.rank, device=where, timeout=timeout, **degrees)
    except BaseException as error:  # noqa: BLE001  # nobody above could tell the other ranks; abort does not return
        watchdog.abort(*describe(error))
    log.info("%d ranks: %s, timeout %.0f s", launch.world_size, degrees, timeout.total_seconds())
    return Session(
        state, watchdog, describe, dist.PrefixStore(f"{launch.run}/session", base), local_rank=launch.local_rank
    )


def _connect(launch: Launch, *, second: bool = False) -> dist.TCPStore:
    """A connection to the store; the watchdog has its own, because a blocking get holds a connection's lock."""
    hosts = launch.rank == 0 and not launch.agent_hosts_store and not second
    return dist.TCPStore(launch.address, launch.port, is_master=hosts, wait_for_workers=False, timeout=CONNECT_TIMEOUT)


def build_state(
    rank: int,
    *,
    device: torch.device,
    timeout: timedelta,
    ulysses_degree: int,
    ring_degree: int,
    data_parallel_degree: int,
) -> ParallelState:
    """Make the groups of these degrees in the process group that is up; every rank calls it, in the same order.

    yunchang makes its Ulysses and ring groups without the timeout given to init_process_group, so it is set afterwards:
    without it an error in a ring hung past 200 s. Under gloo that reaches collectives only: point-to-point calls belong
    on the sequence group, which has the timeout from the start (measured, torch 2.13: tests/.../test_faults.py).
    """
    sequence_degree = ulysses_degree * ring_degree
    world = sequence_degree * data_parallel_degree
    ulysses = ring = sequence = replicas = None
    if sequence_degree > 1:
        from yunchang.globals import PROCESS_GROUP, set_seq_parallel_pg  # it probes for CUDA kernels at import

        set_seq_parallel_pg(ulysses_degree, ring_degree, rank, world)
        ulysses = PROCESS_GROUP.ULYSSES_PG if ulysses_degree > 1 else None
        ring = PROCESS_GROUP.RING_PG if ring_degree > 1 else None
        sequence = dist.group.WORLD
    if data_parallel_degree > 1:
        for first in range(0, world, sequence_degree):
            ranks = list(range(first, first + sequence_degree))
            group = dist.new_group(ranks, timeout=timeout)
            sequence = group if rank in ranks else sequence
        for first in range(sequence_degree):
            ranks = list(range(first, world, sequence_degree))
            group = dist.new_group(ranks, timeout=timeout)
            replicas = group if rank in ranks else replicas
    for group in (ulysses, ring):
        if group is not None:
            dist.distributed_c10d._set_pg_timeout(timeout, group)
    return ParallelState(
        ulysses_degree=ulysses_degree,
        ring_degree=ring_degree,
        data_parallel_degree=data_parallel_degree,
        rank=rank,
        device=device,
        ulysses_group=ulysses,
        ring_group=ring,
        sequence_group=sequence,
        data_parallel_group=replicas,
    )


class Session:
    """This process's part in the world. Leaving it on an exception ends every rank; leaving it in peace waits for all.

    With one process every method is a no-op, and exceptions pass through. SIGTERM and SIGHUP unwind like Ctrl-C in
    either case.
    """

    def __init__(
        self,
        state: ParallelState,
        watchdog: Watchdog | None,
        describe: Describe,
        store: dist.Store | None = None,
        *,
        local_rank: int = 0,
    ) -> None:
        self.state = state
        self.local_rank = local_rank
        self._watchdog = watchdog
        self._describe = describe
        self._store = store
        self._used: dict[str, int] = {}
        self._handlers: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "Session":
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGHUP):
                if signal.getsignal(number) != signal.SIG_IGN:  # nohup wants a closed terminal to go unnoticed
                    self._handlers[number] = signal.signal(number, exit_on_signal)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._watchdog is not None:
            if error is not None and not (isinstance(error, SystemExit) and not error.code):
                self._watchdog.abort(*self._describe(error))
            self._close()
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def on_abort(self, cleanup: Callable[[], None]) -> None:
        """Call this when the process is ended hard, from another thread: to remove what must not stay half-written."""
        if self._watchdog is not None:
            self._watchdog.cleanups.append(cleanup)

    def barrier(self, name: str) -> None:
        """Wait, without a collective and without a time limit, until every rank came to this name once more.

        While rank 0 decodes or downloads, the others wait here; a rank that dies ends the wait through the watchdog.
        """
        if self._store is None:
            return
        key = self._key("barrier", name)
        self._store.add(key, 1)
        poll(lambda: self._store is None or self._store.add(key, 0) >= self.state.world_size)

    def broadcast_object(self, value: Any = None) -> Any:
        """Rank 0's value (small and picklable: a seed, a resolved path) on every rank; no time limit either."""
        if self._store is None:
            return value
        key = self._key("object", "")
        if self.state.rank == 0:
            self._store.set(key, base64.b64encode(pickle.dumps(value)).decode())
            return value
        poll(lambda: self._store is None or self._store.check([key]))
        return pickle.loads(base64.b64decode(self._store.get(key)))

    def gather_objects(self, value: Any) -> list[Any]:
        """Every rank's value (small and picklable), in rank order, on rank 0; nothing elsewhere. No time limit."""
        if self._store is None:
            return [value]
        store, key = self._store, self._key("gather", "")
        store.set(f"{key}/{self.state.rank}", base64.b64encode(pickle.dumps(value)).decode())
        if self.state.rank:
            return []
        keys = [f"{key}/{rank}" for rank in range(self.state.world_size)]
        poll(lambda: store.check(keys))
        return [pickle.loads(base64.b64decode(store.get(name))) for name in keys]

    def _key(self, kind: str, name: str) -> str:
        self._used[kind + name] = self._used.get(kind + name, 0) + 1
        return f"{kind}/{name}/{self._used[kind + name]}"

    def _close(self) -> None:
        assert self._watchdog is not None
        self._watchdog.say_done()
        self.barrier("close")
        dist.destroy_process_group()
        self._watchdog.stop()
        self._store = None
