"""What a card can do, and what the decode must do: bytes and multiplications of every stage, and the time they make."""

import itertools
import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch

from runner_models.ltx2.decoder.geometry import Stage

COLOURS = 3


def elapsed(run: Callable[[], object]) -> float:
    """Seconds of one call on the GPU."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def ceilings() -> dict[str, float]:
    """This card's copy rate, bytes read and written, and its rate at a large bf16 product; medians."""
    source = torch.empty(2**31, dtype=torch.bfloat16, device="cuda")
    for part in source.split(2**28):
        part.normal_()
    target = torch.empty_like(source)
    a = source[: 8192 * 8192].view(8192, 8192)
    copies = [elapsed(lambda: target.copy_(source)) for _ in range(8)]
    products = [elapsed(lambda: a @ a) for _ in range(20)]
    return {
        "copy_bytes_per_s": 2 * source.nbytes / statistics.median(copies[2:]),
        "flops_per_s": 2 * 8192**3 / statistics.median(products[4:]),
    }


def block_ops(stage: Stage, *, context: bool, element: int = 2) -> list[tuple[float, float]]:
    """(bytes, FLOPs) of the ops of one block: each input read once, each output written once."""
    tokens, channels = math.prod(stage.grid), stage.channels
    tensor, product = float(element * tokens * channels), 2.0 * tokens * channels**2
    ops = [
        (4 * tensor, 3 * product),  # residual to Q, K, V
        (4 * tensor, 4.0 * tokens * channels * math.prod(stage.kernel)),  # attention
        (3 * tensor, product),  # output projection, added to the residual
        (2 * tensor, 12 * product),  # gated MLP, added to the residual
    ]
    return [(3 * tensor, product), *ops] if context else ops


def decode_floors(
    stages: Sequence[Stage], rates: dict[str, float], measured_ms: dict[str, float], *, patch: int
) -> list[dict[str, Any]]:
    """A row a stage, and one for what lies between: bytes, FLOPs, the floor (the larger of both times of every op,
    summed) and the measured milliseconds of a one-step decode."""

    def row(name: str, ops: list[tuple[float, float]], measured: Sequence[str]) -> dict[str, Any]:
        floor = sum(max(b / rates["copy_bytes_per_s"], f / rates["flops_per_s"]) for b, f in ops)
        return {
            "stage": name,
            "bytes": sum(b for b, _ in ops),
            "flops": sum(f for _, f in ops),
            "floor_ms": floor * 1e3,
            "measured_ms": sum(measured_ms.get(key, 0.0) for key in measured),
        }

    rows = []
    for number, stage in enumerate(stages, 1):
        ops = block_ops(stage, context=stage is stages[-1]) * stage.depth
        rows.append(row(f"stage {number}", ops, [f"stage {number}"]))
    shuffles = []
    for stage, after in itertools.pairwise(stages):
        into, out = (float(math.prod(s.grid) * s.channels) for s in (stage, after))
        # Written by the product, then read and written by the shuffle.
        shuffles += [(2 * (into + out), 2.0 * out * stage.channels), (4 * out, 0.0)]
    rows.append(row("upsampling", shuffles, ["upsample"]))
    last = stages[-1]
    tokens, numbers = math.prod(last.grid), COLOURS * patch**2
    product = 2.0 * tokens * last.channels * numbers
    ends = [(2.0 * tokens * (numbers + last.channels), product)] * 2
    rows.append(row("noise in, pixels out", ends, ["start", "stepexit"]))
    return rows
