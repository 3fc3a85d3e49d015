"""One end for all ranks: a thread that ends this process when the world has failed, and the cause printed once.

Every rank runs it beside the work. torch's C++ waits release the GIL, so it goes on while the main thread hangs in a
collective. It ends this process, with os._exit, as soon as
- a rank has posted its error in the store (looked at twice a second),
- a rank on this host has died without a word (its process is gone or a zombie),
- SIGTERM, SIGINT or SIGHUP came, and the main thread, stuck in C++ where no Python handler runs, did not unwind.
The first to claim the error key prints the cause; what was half done is removed by callbacks.
"""

import contextlib
import functools
import json
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import NoReturn

import torch.distributed as dist

POLL_S = 0.5
# How long the main thread may unwind after a signal, and the store's host may wait for the others to read the cause:
# together far below the 30 s after which torchrun sends SIGKILL.
UNWIND_S = 5.0
FAREWELL_S = 5.0
# How long the ranks may be apart at the start: imports from a cold network disk take minutes.
PEERS_S = 300.0


@dataclass(frozen=True)
class Launch:
    """What torchrun, or whoever started the ranks, says in the environment."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    address: str = "127.0.0.1"
    port: int = 29500
    agent_hosts_store: bool = False
    run: str = "run"

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> "Launch":
        rank = int(environ.get("RANK", "0"))
        return cls(
            rank=rank,
            local_rank=int(environ.get("LOCAL_RANK", str(rank))),
            world_size=int(environ.get("WORLD_SIZE", "1")),
            address=environ.get("MASTER_ADDR", "127.0.0.1"),
            port=int(environ.get("MASTER_PORT", "29500")),
            agent_hosts_store=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
            run="run/" + environ.get("TORCHELASTIC_RESTART_COUNT", "0"),
        )


class Watchdog:
    """The thread that ends this process when the world has failed. Made on every rank before the process groups."""

    def __init__(self, launch: Launch, store: dist.TCPStore) -> None:
        self.launch = launch
        self.cleanups: list[Callable[[], None]] = []
        self._store = dist.PrefixStore(f"{launch.run}/watchdog", store)
        self._peers: dict[int, tuple[str, int]] = {}
        self._here = _process_namespace()
        self._abort_lock = threading.Lock()
        self._stop = threading.Event()
        self._signals, self._wakeup = socket.socketpair()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def start(self) -> None:
        """Wait for every rank to say who it is, then watch.

        Raises:
            ConnectionError: a rank did not come, or whoever started the ranks has gone.
        """
        parent = os.getppid()
        self._store.set(f"peer/{self.launch.rank}", json.dumps([self._here, os.getpid()]))
        if threading.current_thread() is threading.main_thread():
            # The C handler writes the signal's number here at once, even while no Python handler can run.
            self._wakeup.setblocking(False)
            signal.set_wakeup_fd(self._wakeup.fileno(), warn_on_full_buffer=False)
        for rank in range(self.launch.world_size):
            here = functools.partial(self._store.check, [f"peer/{rank}"])
            poll(lambda here=here: here() or os.getppid() != parent, limit_s=PEERS_S)  # type: ignore[misc]
            if not here():
                raise ConnectionError(f"rank {rank} did not come within {PEERS_S:.0f} s, or torchrun has gone")
            self._peers[rank] = json.loads(self._store.get(f"peer/{rank}"))
        self._thread.start()

    def stop(self) -> None:
        """End the thread. The store's host leaves last, so that nobody polls a store that is gone."""
        self._stop.set()
        self._wakeup.send(b"\0")
        self._thread.join()
        if threading.current_thread() is threading.main_thread():
            signal.set_wakeup_fd(-1)
        with contextlib.suppress(dist.DistError):
            self._store.add("left", 1)
            if self._hosts_store:
                poll(lambda: self._store.add("left", 0) >= self.launch.world_size, limit_s=FAREWELL_S)

    def say_done(self) -> None:
        """From now on, this rank's end is no failure."""
        self._store.set(f"done/{self.launch.rank}", "")

    def abort(self, cause: str, exit_code: int = 1) -> NoReturn:
        """Print the cause unless another rank has posted one, clean up, and end the process with exit_code.

        A lost connection is mostly the echo of a rank that died: a moment is given for its death to be seen, and then
        that is the cause.
        """
        if threading.current_thread() is threading.main_thread():
            # torchrun answers the first rank's end with SIGTERM to the others: it must not cut this short.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        if not self._abort_lock.acquire(blocking=False):
            time.sleep(FAREWELL_S + UNWIND_S)  # the other thread is at it
            os._exit(exit_code)
        try:
            poll(lambda: self._failure_elsewhere() is not None, limit_s=2 * POLL_S)
            text = self._failure_elsewhere() or f"rank {self.launch.rank}: {cause}"
            first = text != _POSTED and self._claim(text)
        except dist.DistError:  # the store went down with its host; its first survivor speaks
            text = self._news_of_death(0) if self._is_dead(0) else f"rank {self.launch.rank}: {cause}"
            first = all(self._is_dead(rank) for rank in range(self.launch.rank))
        if first:
            print(text, file=sys.stderr, flush=True)  # noqa: T201  # not a log line: it must appear at any log level
        for cleanup in self.cleanups:
            with contextlib.suppress(OSError):
                cleanup()
        try:
            self._store.set(f"ended/{self.launch.rank}", "")
            if self._hosts_store:
                poll(self._all_have_ended, limit_s=FAREWELL_S)
        except dist.DistError:
            if first:  # stay alive until the others have looked, or a slower one would speak too
                others = set(range(self.launch.world_size)) - {self.launch.rank}
                poll(lambda: all(self._is_dead(rank) for rank in others), limit_s=FAREWELL_S)
        sys.stdout.flush()
        os._exit(exit_code or 1)

    @property
    def _hosts_store(self) -> bool:
        return self.launch.rank == 0 and not self.launch.agent_hosts_store

    def _watch(self) -> None:
        while True:
            ready, _, _ = select.select([self._signals], [], [], POLL_S)
            if self._stop.is_set():
                return
            received = self._signals.recv(16)[-1] if ready else 0
            try:
                if received in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                    if self._stop.wait(UNWIND_S):
                        return  # the run had just ended in peace
                    self.abort(f"stopped by {signal.Signals(received).name}", 128 + received)
                elif self._failure_elsewhere() is not None:
                    self.abort("ended because another rank failed")
            except dist.DistError as error:
                self.abort(f"lost the store: {error}")

    def _failure_elsewhere(self) -> str | None:
        """_POSTED if some rank has posted its error, the news of a death nobody has posted, or None."""
        if self._store.check(["error"]):
            return _POSTED
        for rank in range(self.launch.world_size):
            if self._is_dead(rank) and not self._store.check([f"done/{rank}"]):
                return self._news_of_death(rank)
        return None

    def _news_of_death(self, rank: int) -> str:
        return f"rank {rank}: process {self._peers[rank][1]} died without an error message (killed?)"

    def _claim(self, text: str) -> bool:
        mine = f"{self.launch.rank} {text}"
        return bool(self._store.compare_set("error", "", mine) == mine.encode())

    def _is_dead(self, rank: int) -> bool:
        """Known only of ranks on this host."""
        namespace, pid = self._peers[rank]
        return namespace == self._here and not _is_running(pid)

    def _all_have_ended(self) -> bool:
        ranks = range(self.launch.world_size)
        return all(self._is_dead(rank) or self._store.check([f"ended/{rank}"]) for rank in ranks)


_POSTED = "posted"


def exit_on_signal(number: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)


def poll(condition: Callable[[], bool], *, limit_s: float = float("inf")) -> None:
    end, pause = time.monotonic() + limit_s, 0.001
    while not condition() and time.monotonic() < end:
        time.sleep(pause)
        pause = min(2 * pause, 0.1)


def _process_namespace() -> str:
    """Process ids mean the same for two ranks with the same host name and pid namespace."""
    link = Path("/proc/self/ns/pid")
    return f"{socket.gethostname()} {os.readlink(link) if link.exists() else ''}"


def _is_running(pid: int) -> bool:
    """False for a process that is gone, and for one that is dead but not yet reaped by its parent."""
    try:
        if Path("/proc/self/stat").exists():
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
            return state not in ("Z", "X")
        os.kill(pid, 0)
    except (FileNotFoundError, ProcessLookupError):
        return False
    return True
