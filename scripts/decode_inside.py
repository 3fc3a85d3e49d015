"""Parts of bench_decode.py: the stock processor, time by stage, one rank's share, estimates, and the table."""

import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from roofline import ceilings, decode_floors

from runner_models.ltx2.decoder import halo
from runner_models.ltx2.decoder.block import Block
from runner_models.ltx2.decoder.budget import decode_bytes
from runner_models.ltx2.decoder.geometry import Halo, split_rows, stages_of
from runner_models.ltx2.decoder.halo import Shard

GIB = 2**30


class StockProcessor:
    """The stock projections with one of our attentions."""

    def __init__(self, attention: Any) -> None:
        self.attention = attention

    def __call__(self, attn: Any, hidden_states: torch.Tensor, block_mask: None = None) -> torch.Tensor:
        """See diffusers' processors."""
        q, k, v = attn.project_qkv(hidden_states)
        return attn.to_out[0](self.attention(q, k, v, attn.kernel_size).flatten(-2))


class NoTransfer:
    """Stands in for a halo exchange: zeros come at once. Right in shape, so that one rank's share can be timed."""

    def __init__(self, shard: Shard, rows: Halo, new: list[torch.Tensor]) -> None:
        for _, span in rows.receives:
            for x in new:
                x.narrow(1 + shard.axis, span[0] - rows.needed[0], span[1] - span[0]).zero_()

    def finish(self) -> None:
        """Nothing is under way."""


class StageTimes:
    """Milliseconds by stage, from events around each piece of work."""

    def __init__(self, bench: Any) -> None:
        self.bench = bench
        self.stages = stages_of(bench.model.config, tuple(bench.latents.shape[2:]))
        self._spans: list[tuple[str, Any, Any]] = []

    def _mark(self) -> Any:
        if not self.bench.on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    @contextmanager
    def watch(self, node: Any) -> Iterator[None]:
        """See runner_models.ltx2.decoder.flow.drive."""
        name = f"stage {self.stages.index(node.stage) + 1}" if isinstance(node, Block) else type(node).__name__.lower()
        start = self._mark()
        yield
        self._spans.append((name, start, self._mark()))

    def milliseconds(self) -> dict[str, float]:
        """By stage, and by kind of the nodes between them."""
        total: dict[str, float] = {}
        if self.bench.on_gpu:
            torch.cuda.synchronize(self.bench.device)
        for name, start, end in self._spans:
            spent = start.elapsed_time(end) if self.bench.on_gpu else (end - start) * 1e3
            total[name] = total.get(name, 0.0) + spent
        return {name: round(spent, 2) for name, spent in total.items()}


def stage_times(bench: Any) -> None:
    """One more run of the exact decode, whole and in the first chunk size, with clocks in it."""
    found = {}
    for chunk in (None, *bench.arguments.chunks[:1]):
        if bench.state.sequence_degree == 1 and bench.left() < 15 and bench.on_gpu:
            break
        times = StageTimes(bench)
        for _ in bench.pieces(chunk, bench.shard(), watch=times.watch):
            pass
        found[f"chunks of {chunk}" if chunk else "whole"] = times.milliseconds()
    bench.result["milliseconds_by_stage"] = found
    if bench.on_gpu and bench.state.sequence_degree == 1:
        rates = bench.result["ceilings"] = ceilings()
        bench.result["roofline"] = {
            way: decode_floors(bench.stages, rates, measured, patch=bench.model.decoder.patch_size)
            for way, measured in found.items()
        }
    bench.save()


def shares(bench: Any) -> None:
    """Seconds of one rank's share of 2, 4 and 8, computed here with empty halos, and the bytes it would receive."""
    axis = bench.axis()
    cells = bench.latents.shape[2 + axis]
    found = []
    for ranks in (2, 4, 8):
        if ranks > cells or (bench.left() < 20 and bench.on_gpu):
            break
        shard = Shard(axis, split_rows(cells, ranks), (ranks - 1) // 2, None)
        with mock.patch.object(halo, "_Transfer", NoTransfer):
            seconds, peaks = [], []
            for _ in range(3):
                _, spent, peak = bench.timed(bench.ours(None, shard))
                seconds.append(spent)
                peaks.append(peak)
        found.append(
            {
                "ranks": ranks,
                "median_seconds": statistics.median(seconds[1:]),
                "peak_gib": max(peaks[1:]),
                "halo_gb_received": halo_bytes(bench, shard) / 1e9,
            }
        )
        bench.say(f"share of one rank of {ranks}: {found[-1]}")
    bench.result["one_rank_of"] = found
    bench.save()


def halo_bytes(bench: Any, shard: Shard) -> int:
    """Bytes of K and V that this rank receives in a whole decode."""
    total = 0
    for stage in stages_of(bench.model.config, tuple(bench.latents.shape[2:])):
        axis = shard.axis
        found = shard.halo(kernel=stage.kernel[axis], length=stage.grid[axis], scale=stage.scale[axis])
        lines = sum(end - begin for _, (begin, end) in found.receives)
        others = stage.grid[0] * stage.grid[1] * stage.grid[2] // stage.grid[axis]
        total += stage.depth * 2 * lines * others * stage.channels * bench.dtype.itemsize
    return total


def estimates(bench: Any) -> None:
    """What the memory estimate says, to compare with the peaks."""
    grid = tuple(bench.latents.shape[2:])
    bench.result["estimated_gib"] = {
        f"chunks of {chunk}" if chunk else "whole": decode_bytes(
            bench.model.config,
            grid,
            element=bench.dtype.itemsize,
            chunk_frames=chunk,
            ranks=bench.state.sequence_degree,
        )
        / GIB
        for chunk in (None, *bench.arguments.chunks)
    }


def relative_l2(got: torch.Tensor, want: torch.Tensor) -> float:
    """By slices of frames: no fp32 copy of the whole."""
    parts = list(zip(got.split(8, dim=2), want.split(8, dim=2), strict=True))
    difference = sum(float((g.float() - w.float()).square().sum()) for g, w in parts)
    return (difference / sum(float(w.float().square().sum()) for _, w in parts)) ** 0.5


def rows(bench: Any, variants: list[Any]) -> None:
    """Put what was measured into the result and write it."""
    bench.result["rows"] = [
        {
            "variant": variant.name,
            **variant.row,
            **(
                {
                    "median_seconds": statistics.median(variant.seconds),
                    "min_seconds": min(variant.seconds),
                    "max_seconds": max(variant.seconds),
                    "runs": len(variant.seconds),
                    "ms_per_frame": statistics.median(variant.seconds) / bench.frames * 1e3,
                }
                if variant.seconds
                else {}
            ),
        }
        for variant in variants
    ]
    bench.save()


def table(result: dict[str, Any]) -> str:
    """For people."""
    lines = [
        f"{result['device']}, {result['dtype']}, latents {'x'.join(map(str, result['latents']))}, "
        f"{result['ranks']} rank(s), weights {result['weights_gib']:.2f} GiB",
        f"{'variant':<36} {'median s':>9} {'min':>7} {'max':>7} {'ms/frame':>9} {'peak GiB':>9}  L2 to stock untiled",
    ]
    for row in result.get("rows", []):
        error = "" if row.get("relative_l2") is None else f"{row['relative_l2']:.1e}"
        if "median_seconds" not in row:
            lines.append(f"{row['variant']:<36} {row.get('error', 'not timed')}")
            continue
        lines.append(
            f"{row['variant']:<36} {row['median_seconds']:>9.3f} {row['min_seconds']:>7.3f} {row['max_seconds']:>7.3f} "
            f"{row['ms_per_frame']:>9.2f} {row['peak_gib']:>9.1f}  {error}"
        )
    for name, times in result.get("milliseconds_by_stage", {}).items():
        lines.append(f"ms, {name}: " + ", ".join(f"{stage} {spent:.0f}" for stage, spent in times.items()))
    for way, floors in result.get("roofline", {}).items():
        for row in floors:
            lines.append(
                f"roofline, {way}, {row['stage']:<21} {row['bytes'] / 1e9:>7.0f} GB {row['flops'] / 1e12:>6.1f} TFLOP  "
                f"floor {row['floor_ms']:>7.1f} ms  took {row['measured_ms']:>7.1f}"
            )
    for share in result.get("one_rank_of", []):
        lines.append(
            f"one rank of {share['ranks']}, transfers left out: {share['median_seconds']:.3f} s, "
            f"{share['peak_gib']:.1f} GiB, receives {share['halo_gb_received']:.2f} GB"
        )
    for name, size in result.get("estimated_gib", {}).items():
        lines.append(f"estimate beside the weights, {name}: {size:.1f} GiB")
    return "\n".join(lines)
