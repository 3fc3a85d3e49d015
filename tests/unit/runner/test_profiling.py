"""The pieces of --profile: ranges of steps, the table, a trace that cannot be written."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from runner.errors import UsageError
from runner.profiling import TOP, top_table, trace, trace_path
from runner_models.ltx2.ranges import step_ranges

CPU = torch.device("cpu")


def _event(key: str, microseconds: float, *, annotation: bool = False) -> Any:
    times = {"self_cpu_time_total": microseconds, "self_device_time_total": 2 * microseconds}
    return SimpleNamespace(key=key, count=3, is_user_annotation=annotation, **times)


def test_the_table_has_the_longest_operations_and_no_ranges() -> None:
    events = [_event("short", 1000.0), _event("stage1", 9e9, annotation=True), _event("long", 3000.0)]
    lines = top_table(events, CPU).splitlines()
    assert [line.split()[-1] for line in lines[1:]] == ["long", "short"]
    assert lines[1].split()[:3] == ["3.0", "75.0%", "3"]
    assert top_table(events, torch.device("cuda")).splitlines()[1].split()[0] == "6.0"
    assert len(top_table([_event(f"op{i}", 1.0 + i) for i in range(50)], CPU).splitlines()) == 1 + TOP


def test_a_trace_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(UsageError, match=r"--profile: .* cannot be written"),
        trace(tmp_path / "file", rank=0, device=CPU),
    ):
        torch.ones(2).sum()


def test_a_trace_has_its_name_once_it_is_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = []

    def half(self: Any, path: str) -> None:
        Path(path).write_text("half of a trace")
        written.append(path)
        raise OSError(28, "No space left on device", path)

    trace_path(tmp_path, 0).write_text("an older one")
    monkeypatch.setattr(torch.profiler.profile, "export_chrome_trace", half)
    with pytest.raises(UsageError, match="No space left"), trace(tmp_path, rank=0, device=CPU):
        torch.ones(2).sum()
    assert written
    assert list(tmp_path.iterdir()) == [trace_path(tmp_path, 0)]
    assert trace_path(tmp_path, 0).read_text() == "an older one"


def test_no_trace_of_a_block_that_fails(tmp_path: Path) -> None:
    with pytest.raises(KeyError), trace(tmp_path, rank=0, device=CPU):
        raise KeyError
    assert not trace_path(tmp_path, 0).exists()


def test_steps_are_named_also_where_guidance_calls_twice_and_a_step_fails() -> None:
    model = torch.nn.Linear(2, 2)

    def steps(stage: str, calls: int, count: int) -> None:
        with step_ranges(model, stage) as end:
            for step in range(count):
                for _ in range(calls):
                    model(torch.ones(2))
                assert end(None, step, None, {"latents": model}) == {"latents": model}

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        steps("stage1", calls=3, count=2)
        steps("stage2", calls=1, count=1)
        with pytest.raises(TypeError), step_ranges(model, "broken"):
            model("no tensor")
    names = [event.name for event in profiler.events() if " step " in event.name]
    assert sorted(names) == ["broken step 1", "stage1 step 1", "stage1 step 2", "stage2 step 1"]
    linears = {
        event.name: sum(child.name == "aten::linear" for child in event.cpu_children) for event in profiler.events()
    }
    assert linears["stage1 step 2"] == 3
    assert not model._forward_pre_hooks
