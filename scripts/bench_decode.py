#!/usr/bin/env python3
"""Time the video decode: the stock decoder, tiled and untiled, against the exact one, whole, in chunks and on N GPUs.

    python scripts/bench_decode.py --out benchmarks/decode.json
    torchrun --nproc_per_node=8 scripts/bench_decode.py --out benchmarks/decode_8.json

Released architecture, random weights made on the device, bf16 on a GPU; latents in, pixels on the device out. The stock
untiled decode with our attention kernel is the reference: an exact variant is compared with it before it is timed. The
stock tiles draw other noise, so that for them the difference is only reported. Variants are interleaved within a round;
rounds end when --seconds would be exceeded. On one GPU the share of one rank of 2, 4 and 8 is timed too, without its
transfers. --out is written after every step. The table is followed by one line of JSON, the last of stdout.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from arguments import at_least, check_device, output_file
from arguments import seconds as budget
from decode_inside import NoTransfer, StockProcessor, estimates, relative_l2, rows, shares, stage_times, table

from layers.neighborhood_attention import na3d_flash_attn, neighborhood_attention_sdpa
from layers.neighborhood_attention.backend import Target, architecture
from layers.neighborhood_attention.builtin import make_triton
from layers.neighborhood_attention.routing import RoutedAttention
from layers.parallel_state import ParallelState
from runner import distributed
from runner.environment import environment
from runner_models.ltx2.build import build_component, component_config
from runner_models.ltx2.decoder import halo
from runner_models.ltx2.decoder.exact import ExactDecoder
from runner_models.ltx2.decoder.geometry import split_rows, stages_of
from runner_models.ltx2.decoder.halo import Shard
from runner_models.ltx2.decoder.options import DecodeOptions
from runner_models.ltx2.decoder.tiled import tiled_decode
from runner_models.ltx2.decoder.video import VideoDecoder

TOLERANCE = 1.5e-2
"""Relative L2 in bf16; a window or a position off by one is at 1e-1 and above."""
TINY = {
    "decoder_stage_channels": [256, 128, 64, 64, 64],
    "decoder_stage_depths": [2, 2, 2, 2, 3],
    "decoder_upsample_channel_reductions": [2, 2, 1, 1],
    "decoder_t_emb_dim": 64,
}
RESERVE_SECONDS = 30
"""For what comes after the rounds."""
SEED = 2
GIB = 2**30


@dataclass
class Variant:
    """One way to decode. `exact`: must agree with the reference; `once`: slow, the verifying run is the only one."""

    name: str
    run: Callable[[], torch.Tensor | None]
    exact: bool = False
    once: bool = False
    seconds: list[float] = field(default_factory=list)
    row: dict[str, Any] = field(default_factory=dict)


class Bench:
    """The model, its latents, and what was measured so far."""

    def __init__(self, arguments: argparse.Namespace, state: ParallelState) -> None:
        self.arguments, self.state, self.device = arguments, state, state.device
        self.started = time.perf_counter()
        self.on_gpu = state.device.type == "cuda"
        self.dtype = torch.bfloat16 if self.on_gpu else torch.float32
        config = component_config("diffusion_decoder", TINY if arguments.tiny else None)
        torch.manual_seed(0)
        self.model: Any = build_component("diffusion_decoder", config, device=self.device, dtype=self.dtype)
        generator = torch.Generator(self.device).manual_seed(1)
        shape = (1, config["latent_channels"], *arguments.latents)
        self.latents = torch.randn(shape, generator=generator, device=self.device, dtype=self.dtype)
        self.stages = stages_of(self.model.config, tuple(arguments.latents))
        self.fast: Any = na3d_flash_attn if self.on_gpu else neighborhood_attention_sdpa
        self.kernel = "our kernel" if self.on_gpu else "sdpa"
        self.exact = ExactDecoder(self.model, attention=self.routed())
        self.frames = 8 * arguments.latents[0] - 7
        self.result: dict[str, Any] = {
            **environment(self.device),
            "dtype": str(self.dtype).removeprefix("torch."),
            "latents": list(shape),
            "ranks": state.sequence_degree,
            "weights_gib": sum(p.nbytes for p in self.model.parameters()) / GIB,
        }

    def routed(self) -> Any:
        """Our attention as a run has it, with softmax bounds; on a CPU tiled SDPA."""
        if not self.on_gpu:
            return neighborhood_attention_sdpa
        kernels = tuple(dict.fromkeys(stage.kernel for stage in self.stages))
        target = Target(
            self.device, architecture(self.device), self.dtype, self.model.config["decoder_head_dim"], kernels
        )
        return RoutedAttention([make_triton(target)])

    def generator(self) -> torch.Generator:
        """The noise of every variant."""
        return torch.Generator(self.device).manual_seed(SEED)

    def stock(self, attention: Any, *, tiled: bool) -> torch.Tensor:
        """(1, 3, F, H, W) of the stock decoder."""
        self.model.set_attn_processor(StockProcessor(attention))
        if tiled:
            self.model.enable_tiling()
        else:
            self.model.disable_tiling()
        return self.model.decode(self.latents, generator=self.generator(), return_dict=False)[0]

    def pieces(self, chunk: int | None, shard: Shard | None, **options: Any) -> Iterator[torch.Tensor]:
        """(1, n, 3, H', W') of the exact decode."""
        return self.exact.decode(self.latents, generator=self.generator(), chunk_frames=chunk, shard=shard, **options)

    def ours(self, chunk: int | None, shard: Shard | None = None) -> Callable[[], torch.Tensor | None]:
        """A run that keeps no piece while it is timed, and all of them while it is verified."""

        def run() -> torch.Tensor | None:
            kept = [piece if self.verifying else None for piece in self.pieces(chunk, shard)]
            return torch.cat(kept, dim=1).transpose(1, 2) if self.verifying else None  # type: ignore[arg-type]

        return run

    def without_transfers(self, shard: Shard | None) -> Callable[[], torch.Tensor | None]:
        """What transfers cost is the difference: its values at the borders are wrong."""

        def run() -> None:
            with mock.patch.object(halo, "_Transfer", NoTransfer):
                for _ in self.pieces(None, shard):
                    pass

        return run

    verifying = False

    def on_the_host(self) -> None:
        """The whole way, to bytes in host memory."""
        options = DecodeOptions(parallel=self.state.sequence_degree > 1)
        decoder = VideoDecoder(self.model, None, attention=self.exact.attention, options=options, state=self.state)
        for _ in decoder.frames(self.latents, self.generator()):
            pass

    def shard(self) -> Shard | None:
        """This rank's, on several ranks."""
        ranks = self.state.sequence_degree
        axis = self.axis()
        bounds = split_rows(self.latents.shape[2 + axis], ranks)
        return Shard(axis, bounds, self.state.sequence_rank, self.state.sequence_group) if ranks > 1 else None

    def axis(self) -> int:
        """The one that ranks share: 1 for rows, 2 for columns."""
        return 2 if self.latents.shape[4] > self.latents.shape[3] else 1

    def variants(self) -> list[Variant]:
        """In the order of the table; on several ranks only what uses them all."""
        sdpa, fast, kernel = neighborhood_attention_sdpa, self.fast, self.kernel
        chunks = self.arguments.chunks
        if self.state.sequence_degree > 1:
            shard = self.shard()
            ranks = f"{self.state.sequence_degree} ranks"
            return [
                Variant(f"exact, {ranks}", self.ours(None, shard), exact=True),
                *(Variant(f"exact, {ranks}, chunks of {c}", self.ours(c, shard), exact=True) for c in chunks),
                Variant(f"exact, {ranks}, transfers left out", self.without_transfers(shard)),
                Variant(f"exact, {ranks}, bytes on the host", self.on_the_host),
                Variant(f"stock tiled, {kernel}, {ranks}", self._tiled_on_all),
            ]
        return [
            Variant("stock tiled, sdpa", lambda: self.stock(sdpa, tiled=True), once=True),
            Variant(f"stock tiled, {kernel}", lambda: self.stock(fast, tiled=True)),
            Variant(f"stock untiled, {kernel}", lambda: self.stock(fast, tiled=False), exact=True),
            Variant("exact", self.ours(None), exact=True),
            *(Variant(f"exact, chunks of {c}", self.ours(c), exact=True) for c in chunks),
            Variant("exact, bytes on the host", self.on_the_host),
        ]

    def _tiled_on_all(self) -> torch.Tensor | None:
        self.model.set_attn_processor(StockProcessor(self.fast))
        return tiled_decode(self.model, self.latents, generator=self.generator(), state=self.state)

    def timed(self, run: Callable[[], Any]) -> tuple[Any, float, float]:
        """What a run gives, its seconds on the slowest rank, and its peak GiB on the largest."""
        if self.on_gpu:
            torch.cuda.synchronize(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
        if self.state.sequence_degree > 1:
            dist.barrier(group=self.state.sequence_group)
        start = time.perf_counter()
        found = run()
        if self.on_gpu:
            torch.cuda.synchronize(self.device)
        seconds = time.perf_counter() - start
        peak = torch.cuda.max_memory_allocated(self.device) / GIB if self.on_gpu else 0.0
        if self.state.sequence_degree > 1:
            worst = torch.tensor([seconds, peak], device=self.device)
            dist.all_reduce(worst, op=dist.ReduceOp.MAX, group=self.state.sequence_group)
            seconds, peak = worst.tolist()
        return found, seconds, peak

    def left(self) -> float:
        """Seconds of the budget."""
        return self.arguments.seconds - (time.perf_counter() - self.started)

    def say(self, text: str) -> None:
        """Progress, on stderr."""
        if self.state.rank == 0:
            print(f"[{time.perf_counter() - self.started:6.1f} s] {text}", file=sys.stderr, flush=True)

    def save(self) -> None:
        """Write what there is."""
        if self.arguments.out and self.state.rank == 0:
            self.arguments.out.parent.mkdir(parents=True, exist_ok=True)
            self.arguments.out.write_text(json.dumps(self.result, indent=2) + "\n")


def reference(bench: Bench) -> torch.Tensor:
    """The decode that all are compared with; which one it was stands in the result."""
    if bench.arguments.reference == "exact":
        bench.result["reference"] = "exact, chunks of 16"
        bench.say("reference: exact, chunks of 16")
        return torch.cat(list(bench.pieces(16, None)), dim=1).transpose(1, 2)
    bench.result["reference"] = "stock untiled"
    bench.say("reference: stock untiled")
    return bench.stock(bench.fast, tiled=False)


def verify(bench: Bench, variants: list[Variant]) -> list[Variant]:
    """Run each once against the stock untiled decode; those that may be timed."""
    want = reference(bench)
    shard = bench.shard()
    if shard is not None:
        begin, end = shard.scaled(32)[shard.rank]
        own = want.narrow(2 + shard.axis, begin, end - begin)
    good = []
    bench.verifying = True
    for variant in variants:
        try:
            got, seconds, peak = bench.timed(variant.run)
        except torch.OutOfMemoryError as error:
            if bench.state.sequence_degree > 1:
                raise
            variant.row["error"] = f"out of memory: {str(error).splitlines()[0]}"
            bench.say(f"{variant.name}: {variant.row['error']}")
            continue
        if got is not None:
            mine = own if shard is not None and got.shape != want.shape else want
            variant.row["relative_l2"] = relative_l2(got, mine)
        del got
        bench.say(f"verified {variant.name}: {seconds:.2f} s, relative L2 {variant.row.get('relative_l2')}")
        if variant.exact and not variant.row["relative_l2"] <= TOLERANCE:
            variant.row["error"] = f"wrong: relative L2 {variant.row['relative_l2']:.1e}; not timed"
            continue
        if variant.once:
            variant.seconds.append(seconds)
            variant.row["peak_gib"] = peak
        else:
            good.append(variant)
    bench.verifying = False
    return good


def measure(bench: Bench, variants: list[Variant]) -> None:
    """Rounds of all variants in turn, while there is time."""
    for round_ in range(bench.arguments.rounds):
        for variant in variants:
            last = variant.seconds[-1] if variant.seconds else 0.0
            enough = torch.tensor(
                float(bench.left() > 1.5 * last + RESERVE_SECONDS * bench.on_gpu), device=bench.device
            )
            if bench.state.sequence_degree > 1:
                dist.all_reduce(enough, op=dist.ReduceOp.MIN, group=bench.state.sequence_group)
            if not enough:
                bench.say(f"the time is up in round {round_ + 1}")
                return
            seconds, peak = bench.timed(variant.run)[1:]  # its video is not held while the next one runs
            variant.seconds.append(seconds)
            variant.row["peak_gib"] = max(peak, variant.row.get("peak_gib", 0.0))
        bench.say(f"round {round_ + 1} of {bench.arguments.rounds}")


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--latents", type=at_least(1), nargs=3, default=(16, 48, 32), metavar=("T", "H", "W"))
    parser.add_argument(
        "--chunks", type=at_least(8, multiple_of=8), nargs="*", default=(16, 8), help="frames (default: 16 8)"
    )
    parser.add_argument("--rounds", type=at_least(1), default=3)
    parser.add_argument("--seconds", type=budget, default=190, help="budget of the whole run (default: 190)")
    parser.add_argument(
        "--reference",
        choices=("stock", "exact"),
        default="stock",
        help="compare with the stock untiled decode (default), or where that does not fit or, past 2**32 numbers a "
        "tensor, does not give the same twice, with the exact one in chunks of 16 (one rank)",
    )
    parser.add_argument("--skip_sdpa", action="store_true", help="leave the slowest variant out")
    parser.add_argument("--tiny", action="store_true", help="the tiny decoder, to try the script out")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda; cpu where --tiny finds no GPU")
    parser.add_argument("--out", type=output_file, help="also write the JSON here")
    arguments = parser.parse_args(argv)
    arguments.device = check_device(parser, arguments.device, small=arguments.tiny, instead="give --tiny")
    try:
        stages_of(component_config("diffusion_decoder", TINY if arguments.tiny else None), arguments.latents)
        split_rows(max(arguments.latents[1:]), int(os.environ.get("WORLD_SIZE", "1")))
    except ValueError as error:
        parser.error(f"--latents {' '.join(map(str, arguments.latents))}: {error}")
    return arguments


@torch.inference_mode()
def run(bench: Bench) -> None:
    """Verify, then time, then look inside."""
    variants = [v for v in bench.variants() if not (bench.arguments.skip_sdpa and v.once)]
    estimates(bench)
    good = verify(bench, variants)
    measure(bench, good)
    rows(bench, variants)
    stage_times(bench)
    if bench.state.sequence_degree == 1:
        shares(bench)


def main() -> None:
    arguments = parse()
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    with distributed.start(ulysses_degree=ranks, device=arguments.device) as session:
        bench = Bench(arguments, session.state)
        run(bench)
        bench.result["seconds_in_all"] = time.perf_counter() - bench.started
        bench.save()
        if session.state.rank == 0:
            print(table(bench.result))
            print(json.dumps(bench.result))


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("interrupted")
