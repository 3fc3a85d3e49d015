"""The session of one process, refusals before anything starts, and the words for a failure; no process group."""

import signal

import pytest
import torch
import torch.distributed as dist

from runner.distributed import describe_failure, start
from runner.watchdog import Launch


def test_one_process_needs_nothing() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with start(environ={}) as session:
        assert session.state.world_size == 1
        assert session.state.device == torch.device("cpu")
        assert session.broadcast_object({"seed": 3}) == {"seed": 3}
        session.barrier("decode")
        session.on_abort(lambda: None)
        assert not dist.is_initialized()
    assert signal.getsignal(signal.SIGTERM) is before


def test_one_process_lets_exceptions_through() -> None:
    with pytest.raises(KeyError), start(environ={"WORLD_SIZE": "1", "RANK": "0"}):
        raise KeyError("mine")


def test_sigterm_unwinds_one_process() -> None:
    with pytest.raises(SystemExit) as ended, start(environ={}):
        signal.raise_signal(signal.SIGTERM)
    assert ended.value.code == 128 + signal.SIGTERM


@pytest.mark.parametrize(
    ("degrees", "says"),
    [({"ulysses_degree": 2}, "1 process was started")],
)
def test_degrees_are_refused_before_anything_starts(degrees: dict[str, int], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        start(environ={}, **degrees)  # type: ignore[arg-type]
    assert not dist.is_initialized()


def test_environment_of_torchrun() -> None:
    environ = {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "MASTER_ADDR": "a", "MASTER_PORT": "12"}
    launch = Launch.from_environment(environ | {"TORCHELASTIC_USE_AGENT_STORE": "True"})
    assert (launch.rank, launch.local_rank, launch.world_size, launch.port) == (5, 1, 8, 12)
    assert launch.agent_hosts_store
    assert not Launch.from_environment(environ).agent_hosts_store


@pytest.mark.parametrize(
    ("error", "text", "code"),
    [
        (KeyboardInterrupt(), "interrupted", 130),
        (SystemExit(143), "stopped by SIGTERM", 143),
        (SystemExit("no disk"), "exited with no disk", 1),
        (ValueError("boom"), "ValueError: boom", 1),
    ],
)
def test_words_for_a_failure(error: BaseException, text: str, code: int) -> None:
    said, exit_code = describe_failure(error)
    assert said.startswith(text)
    assert exit_code == code
