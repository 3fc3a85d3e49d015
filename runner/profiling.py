"""--profile: a chrome trace of one request on every rank, and the operations that took longest.

The names in a trace: encode, stage1 with its steps, upsample, stage2, audio_decode, video_decode with the decoder's
stages (its blocks and what lies between them), mux.
"""

import logging
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from runner.errors import UsageError

logger = logging.getLogger(__name__)

TOP = 20


def trace_path(directory: Path, rank: int) -> Path:
    """Where a rank writes; xfuser's name."""
    return directory / f"profile_trace_rank_{rank}.json.gz"


@contextmanager
def trace(directory: Path, *, rank: int, device: torch.device) -> Iterator[None]:
    """Profile the block and write this rank's trace when it ends in peace, over an older one of that name.

    Shapes and stacks are left out, which keeps a request at megabytes. The block runs slower than without.

    Raises:
        UsageError: the trace cannot be written.
    """
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profiler:
        yield
    path = trace_path(directory, rank)
    partial = path.with_name(f".{uuid.uuid4().hex}.{path.name}")  # two runs may end here at the same time
    try:
        directory.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(partial))
        size = partial.stat().st_size
        partial.replace(path)
    except (OSError, RuntimeError) as error:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        raise UsageError(f"--profile: {path} cannot be written ({error}).") from error
    if rank == 0:
        logger.info("profile of the last request, %.1f MB: %s (open at https://ui.perfetto.dev)", size / 1e6, path)
        table = top_table(profiler.key_averages(), device)
        logger.info("the timings of that request include the profiler's own\n%s", table)


def top_table(averages: Sequence[Any], device: torch.device) -> str:
    """The operations with the most time of their own: on the GPU where there is one, else on the CPU."""
    name = "self_device_time_total" if device.type == "cuda" else "self_cpu_time_total"
    events = [event for event in averages if not event.is_user_annotation and getattr(event, name) > 0]
    events.sort(key=lambda event: -getattr(event, name))
    total = sum(getattr(event, name) for event in events) or 1
    lines = [
        f"{'ms':>10} {'share':>6} {'calls':>8}  operation ({'GPU' if device.type == 'cuda' else 'CPU'} time of its own)"
    ]
    for event in events[:TOP]:
        spent = getattr(event, name)
        lines.append(f"{spent / 1e3:>10.1f} {spent / total:>6.1%} {event.count:>8}  {event.key[:100]}")
    return "\n".join(lines)
