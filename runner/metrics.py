"""Where the time and the memory of a run went: stage clocks, peak memory, metrics.json, the closing table."""

import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.profiler import record_function


@dataclass(frozen=True)
class Sample:
    """One timed request: seconds by stage, in order, and each rank's peak memory in bytes while it ran."""

    iteration: int
    prompt_index: int
    stage_seconds: dict[str, float]
    peak_memory_bytes: tuple[int, ...]

    @property
    def total_seconds(self) -> float:
        """Prompt to pixels and waveform; `mux`, which only a saved video has, is left out."""
        return sum(seconds for stage, seconds in self.stage_seconds.items() if stage != "mux")

    def to_json(self) -> dict[str, Any]:
        """Flat, with the unit in every key."""
        stages = {f"{stage}_seconds": seconds for stage, seconds in self.stage_seconds.items()}
        return {
            "iteration": self.iteration,
            "prompt_index": self.prompt_index,
            **stages,
            "total_seconds": self.total_seconds,
            "peak_memory_bytes": max(self.peak_memory_bytes),
            "peak_memory_bytes_per_rank": list(self.peak_memory_bytes),
        }


@dataclass
class StageClock:
    """`with clock("stage1"):` adds the seconds of a stage; on a GPU the device is idle at both ends of each."""

    device: torch.device
    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        """Time one stage and name it in a trace; a stage entered twice adds up."""
        self._synchronize()
        start = time.perf_counter()
        with record_function(stage):
            yield
            self._synchronize()
        self.seconds[stage] = self.seconds.get(stage, 0.0) + time.perf_counter() - start

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def slowest(samples: Sequence[Sample]) -> Sample:
    """One sample for a request that several ranks made together: each stage by its slowest rank, every peak."""
    stages = list(dict.fromkeys(stage for sample in samples for stage in sample.stage_seconds))
    return Sample(
        samples[0].iteration,
        samples[0].prompt_index,
        {stage: max(sample.stage_seconds.get(stage, 0.0) for sample in samples) for stage in stages},
        tuple(peak for sample in samples for peak in sample.peak_memory_bytes),
    )


def reset_peak_memory(device: torch.device) -> None:
    """Start a new peak; on a CPU the peak is the process's and cannot be reset."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak_memory_bytes(device: torch.device) -> int:
    """Most memory held at once since the last reset: the allocator's on a GPU, resident memory on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    import resource
    import sys

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def device_name(device: torch.device) -> str:
    """The card's name, for figures that mean nothing without it; of a CPU the architecture and the threads in use."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    import platform

    return f"{platform.machine()} CPU, {torch.get_num_threads()} threads"


def summarise(samples: Sequence[Sample]) -> dict[str, dict[str, float]]:
    """Median, minimum and maximum seconds of each stage and of the total, over the samples that ran it."""
    stages = list(dict.fromkeys(stage for sample in samples for stage in sample.stage_seconds))
    columns = {stage: [s.stage_seconds[stage] for s in samples if stage in s.stage_seconds] for stage in stages}
    mux = {stage: columns.pop(stage) for stage in ("mux",) if stage in columns}
    columns |= {"total": [sample.total_seconds for sample in samples]} | mux
    return {
        stage: {"median_seconds": statistics.median(c), "min_seconds": min(c), "max_seconds": max(c)}
        for stage, c in columns.items()
    }


def summary_table(samples: Sequence[Sample]) -> str:
    """The closing table: a line a stage, seconds and share of the total."""
    summary = summarise(samples)
    total = summary["total"]["median_seconds"] or 1.0
    lines = [f"{'stage':<14}{'median s':>10}{'min s':>10}{'max s':>10}{'share':>8}"]
    for stage, row in summary.items():
        median, low, high = row["median_seconds"], row["min_seconds"], row["max_seconds"]
        share = "" if stage == "mux" else f"{median / total:.0%}"
        lines.append(f"{stage:<14}{median:>10.3f}{low:>10.3f}{high:>10.3f}{share:>8}")
    peak = max(max(sample.peak_memory_bytes) for sample in samples) / 2**30
    lines.append(f"peak memory {peak:.2f} GiB over {len(samples)} timed request{'s' if len(samples) > 1 else ''}")
    return "\n".join(lines)
