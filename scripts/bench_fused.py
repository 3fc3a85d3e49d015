#!/usr/bin/env python3
"""Time the fused ops of the video decoder against what this card can do: its copy rate and its matrix rate.

    python scripts/bench_fused.py --out benchmarks/fused.json
    python scripts/bench_fused.py --sweep        # try block sizes of the two large kernels as well

Every op is compared with plain torch in fp32 on a part of its input before it is timed; a wrong one is not timed. The
floor of an op is the larger of two times: the bytes it must move over the card's copy rate, and its multiplications
over the rate of a large matrix product, both measured in this run. Variants are interleaved. The last line of stdout is
one JSON object.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from arguments import at_least, output_file, seconds
from roofline import ceilings, elapsed

from layers.fused import heads, launch, narrow, reference, tokens
from layers.fused.launch import Blocks
from layers.neighborhood_attention.backend import kernel_errors
from runner.environment import environment

EPS = 1e-6
HEAD_DIM = 64
TOLERANCE = 8e-3
"""Relative L2 of bf16 against fp32; a wrong gain or angle is at 1e-1."""
SWEEP = (
    Blocks((128, 32, 8, 3), (64, 4, 2), tma=True),
    Blocks((128, 32, 8, 2), (64, 4, 1), tma=True),
    Blocks((128, 16, 8, 3), (128, 8, 2), tma=True),
    Blocks((64, 32, 4, 2), (128, 8, 3), tma=True),
    Blocks((128, 32, 8, 3), (64, 4, 2)),
)


@dataclass
class Op:
    """`run` works on the whole input; `check` gives relative L2 against fp32. bytes and flops are what it must do."""

    name: str
    shape: str
    run: Callable[[], object]
    check: Callable[[], float]
    bytes: float
    flops: float
    seconds: list[float] = field(default_factory=list)


def randn(*shape: int) -> torch.Tensor:
    """bf16, in slices: no fp32 copy of a large tensor."""
    out = torch.empty(shape, dtype=torch.bfloat16, device="cuda")
    for part in out.view(-1).split(2**28):
        part.normal_()
    return out


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    """Relative L2."""
    return float((got.float() - want.float()).norm() / want.float().norm())


class Half:
    """Input and weights of a block of `channels` on a (T, H, W) grid; the checks look at the last two frames."""

    def __init__(self, grid: tuple[int, int, int], channels: int) -> None:
        self.grid, self.channels, self.count = grid, channels, grid[0] * grid[1] * grid[2]
        self.name = f"{'x'.join(map(str, grid))}x{channels}"
        self.x = randn(1, *grid, channels)
        self.y = randn(1, *grid, channels)
        self.gain = torch.rand(channels, device="cuda").bfloat16() + 0.5
        self.scale, self.shift = (randn(1, 1, 1, 1, channels) * 0.2 + one for one in (1, 0))
        self.w_qkv, self.b_qkv = randn(3 * channels, channels) * channels**-0.5, randn(3 * channels) * 0.1
        self.gate, self.up = (randn(4 * channels, channels) * channels**-0.5 for _ in range(2))
        self.down = randn(channels, 4 * channels) * (4 * channels) ** -0.5
        self.pending = torch.randn(channels, device="cuda") * 0.1
        gains = torch.rand(2, HEAD_DIM, device="cuda") + 0.5
        self.norms = heads.HeadNorms(gains, EPS)
        frequencies = [torch.logspace(0, -3, n, device="cuda") for n in (8, 12, 12)]
        self.rotary = heads.rotary_table(frequencies, grid)
        self.tail_rotary = self.rotary.part((grid[0] - 2, 0, 0))

    @property
    def bytes(self) -> float:
        """Of one tensor of tokens."""
        return 2.0 * self.count * self.channels

    def tail(self, x: torch.Tensor) -> torch.Tensor:
        """A copy of the last two frames."""
        return x[:, -2:].clone()

    def normed(self, x: torch.Tensor, pending: torch.Tensor | None = None) -> torch.Tensor:
        """fp32 norm and modulation of x + pending."""
        x = x.float() if pending is None else x.float() + pending
        return reference.rms_norm(x, self.gain, eps=EPS, scale=self.scale, shift=self.shift)

    def heads_of(self, qkv: torch.Tensor) -> torch.Tensor:
        """(3, ...) fp32 heads of the last two frames."""
        parts = qkv.float().unflatten(-1, (3, -1, HEAD_DIM))
        tail = self.tail_rotary
        table = tail.table, tail.split, tail.firsts
        q, k = (reference.norm_and_rotate(parts[..., i, :, :], self.norms.gains[i], *table, eps=EPS) for i in (0, 1))
        return torch.stack((q, k, parts[..., 2, :, :]))

    def out(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Places for Q, K, V."""
        shape = (1, *self.grid, self.channels // HEAD_DIM, HEAD_DIM)
        return tuple(torch.empty(shape, dtype=torch.bfloat16, device="cuda") for _ in range(3))  # type: ignore[return-value]


def passes(half: Half) -> list[Op]:
    """The ops that are a pass over memory; x changes as they are timed, so they are checked first."""
    fold = {"eps": EPS, "scale": half.scale, "shift": half.shift}

    def check_norm() -> float:
        return relative(tokens.rms_norm(half.tail(half.x), half.gain, **fold), half.normed(half.tail(half.x)))

    def check_add() -> float:
        x, y = half.tail(half.x), half.tail(half.y)
        want = half.normed(x + y)
        return relative(tokens.add_rms_norm_(x, y, half.gain, **fold), want)

    qkv = randn(1, *half.grid, 3 * half.channels)
    own = tuple(qkv.unflatten(-1, (3, -1, HEAD_DIM)).unbind(-3))

    def check_heads() -> float:
        before = half.tail(qkv)
        heads.norm_rotate_heads(qkv, half.norms, half.rotary, out=own)
        return relative(torch.stack([half.tail(x) for x in own]), half.heads_of(before))

    return [
        Op("norm + AdaLN", half.name, lambda: tokens.rms_norm(half.x, half.gain, **fold),
           check_norm, 2 * half.bytes, 0),
        Op("residual + norm + AdaLN", half.name, lambda: tokens.add_rms_norm_(half.x, half.y, half.gain, **fold),
           check_add, 4 * half.bytes, 0),
        Op("q/k norm + RoPE, in place", half.name,
           lambda: heads.norm_rotate_heads(qkv, half.norms, half.rotary, out=own), check_heads, 6 * half.bytes, 0),
    ]  # fmt: skip


def halves(half: Half, launches: list[Blocks]) -> list[Op]:
    """The two large kernels, with every choice of blocks."""
    out = half.out()
    norm = (half.gain, (half.scale.flatten(), half.shift.flatten()), half.pending)
    into = narrow.fold_norm(half.w_qkv, half.b_qkv, *norm)
    found = []
    for blocks in launches:
        with mock.patch.object(narrow, "blocks", return_value=blocks):
            mlp = narrow.pack_mlp(
                narrow.fold_norm(half.gate, None, *norm), narrow.fold_norm(half.up, None, *norm), half.down
            )

        def with_blocks(call: Callable[[], Any], blocks: Blocks = blocks) -> Any:
            with mock.patch.object(narrow, "blocks", return_value=blocks):
                return call()

        def project() -> None:
            narrow.project_heads(half.x, half.pending, into, half.norms, half.rotary, eps=EPS, out=out)

        def check_project() -> float:
            for x in out:
                x.fill_(float("nan"))
            with_blocks(project)
            qkv = F.linear(half.normed(half.tail(half.x), half.pending), half.w_qkv.float(), half.b_qkv.float())
            return relative(torch.stack([half.tail(x) for x in out]), half.heads_of(qkv))

        def run_mlp(x: torch.Tensor, mlp: Any = mlp) -> torch.Tensor:
            return narrow.gated_mlp_(x, half.pending, mlp, eps=EPS)

        def check_mlp() -> float:
            x = half.tail(half.x)
            normed = half.normed(x, half.pending)
            hidden = F.silu(F.linear(normed, half.gate.float())) * F.linear(normed, half.up.float())
            want = x.float() + half.pending + F.linear(hidden, half.down.float())
            return relative(with_blocks(lambda: run_mlp(x)), want)

        products = 2.0 * half.count * half.channels**2
        found.append(Op(f"norm to Q, K, V {blocks.qkv}{' TMA' * blocks.tma}", half.name,
                        lambda w=with_blocks: w(project), check_project, 4 * half.bytes, 3 * products))  # fmt: skip
        found.append(Op(f"norm, gated MLP, residual {blocks.mlp}{' TMA' * blocks.tma}", half.name,
                        lambda w=with_blocks, r=run_mlp: w(lambda: r(half.x)), check_mlp,
                        2 * half.bytes, 12 * products))  # fmt: skip
    return found


def measure(ops: list[Op], seconds: float) -> list[dict[str, Any]]:
    """Check all, then rounds of those that are right."""
    rows, good = [], []
    for op in ops:
        try:
            error = op.check()
        except kernel_errors() as failure:
            rows.append({"op": op.name, "shape": op.shape, "error": f"{type(failure).__name__}: {failure}"[:300]})
            continue
        if error <= TOLERANCE:
            op.run()
            good.append((op, error))
        else:
            rows.append({"op": op.name, "shape": op.shape, "error": f"relative L2 {error:.1e}", "relative_l2": error})
    end = time.perf_counter() + seconds
    while good and (time.perf_counter() < end or len(good[-1][0].seconds) < 3):
        for op, _ in good:
            op.seconds.append(elapsed(op.run))
    for op, error in good:
        rows.append(
            {
                "op": op.name,
                "shape": op.shape,
                "relative_l2": error,
                "median_ms": statistics.median(op.seconds) * 1e3,
                "min_ms": min(op.seconds) * 1e3,
                "max_ms": max(op.seconds) * 1e3,
                "runs": len(op.seconds),
                "gigabytes": op.bytes / 1e9,
                "teraflops": op.flops / 1e12,
            }
        )
    return rows


def with_floors(rows: list[dict[str, Any]], rates: dict[str, float]) -> None:
    """Add what the bytes and the products alone would take."""
    for row in rows:
        if "median_ms" in row:
            row["bytes_ms"] = row["gigabytes"] * 1e12 / rates["copy_bytes_per_s"]
            row["flops_ms"] = row["teraflops"] * 1e15 / rates["flops_per_s"]
            row["times_floor"] = row["median_ms"] / max(row["bytes_ms"], row["flops_ms"])


def table(result: dict[str, Any]) -> str:
    """For people."""
    rates = result["ceilings"]
    lines = [
        f"{result['device']}: copies {rates['copy_bytes_per_s'] / 1e9:.0f} GB/s, products "
        f"{rates['flops_per_s'] / 1e12:.0f} TFLOP/s",
        f"{'op':<46} {'shape':<18} {'median ms':>9} {'min':>7} {'bytes ms':>9} {'flops ms':>9} {'x floor':>8}  L2",
    ]
    for row in result["rows"]:
        if "error" in row:
            lines.append(f"{row['op']:<46} {row['shape']:<18} {row['error']}")
            continue
        lines.append(
            f"{row['op']:<46} {row['shape']:<18} {row['median_ms']:>9.3f} {row['min_ms']:>7.3f} "
            f"{row['bytes_ms']:>9.3f} {row['flops_ms']:>9.3f} {row['times_floor']:>8.2f}  {row['relative_l2']:.1e}"
        )
    return "\n".join(lines)


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--frames", type=at_least(1), default=121, help="of the 384x256 grid of 256 channels (default: 121)"
    )
    parser.add_argument("--seconds", type=seconds, default=3, help="of rounds for each group of ops (default: 3)")
    parser.add_argument("--sweep", action="store_true", help="try other block sizes")
    parser.add_argument("--out", type=output_file, help="also write the JSON here")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a GPU")
    device = torch.device("cuda")
    result: dict[str, Any] = {**environment(device), "ceilings": ceilings(), "rows": []}
    own = launch.blocks(device)
    for grid, channels in (((arguments.frames, 384, 256), 256), ((69, 192, 128), 512)):
        half = Half(grid, channels)
        result["rows"] += measure(passes(half), arguments.seconds / 3)
        if channels <= narrow.MAX_CHANNELS:
            launches = [own]
            if arguments.sweep:
                launches += [blocks for blocks in SWEEP if blocks != own]
            result["rows"] += measure(halves(half, launches), arguments.seconds)
    with_floors(result["rows"], result["ceilings"])
    if arguments.out:
        arguments.out.write_text(json.dumps(result, indent=2) + "\n")
    print(table(result))
    print(json.dumps(result))


if __name__ == "__main__":
    main()
