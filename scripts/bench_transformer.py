#!/usr/bin/env python3
"""Time one forward of the LTX-2.5 transformer, eager and compiled, at the token counts of both distilled stages.

    python scripts/bench_transformer.py --out benchmarks/transformer.json
    torchrun --nproc_per_node=8 scripts/bench_transformer.py --ulysses_degree 8

Released architecture, random weights made on the device, bf16 on a GPU. Every variant is compared with the stock eager
forward before it is timed (on several ranks: with the stock forward of the whole on each rank); the variants of a stage
are interleaved. On several ranks two more are timed: the whole, compiled, on each GPU alone, and this rank's share with
its transfers left out, whose difference to "compiled" is what communication costs. The last line of stdout is one JSON
object.
"""

import argparse
import copy
import functools
import json
import statistics
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from arguments import at_least, check_device, output_file

from layers import ulysses
from layers.attention_backends import select_backend
from layers.parallel_state import ParallelState
from runner import distributed
from runner.environment import environment
from runner_models.ltx2.build import build_component, component_config
from runner_models.ltx2.compilation import compile_blocks, compile_seconds
from runner_models.ltx2.recipes import DISTILLED, TokenCounts, token_counts
from runner_models.ltx2.transformer import parallelize

TOLERANCE = 2e-2
"""Relative L2 in bf16, through 48 blocks; a wrong shard or a stale graph is at 1e-1 and above."""


ALONE = "compiled, one GPU"
NO_TRANSFERS = "compiled, no transfers"


def make_inputs(model: Any, counts: TokenCounts, *, prompt_tokens: int, device: torch.device) -> dict[str, Any]:
    """What the distilled pipeline passes: one timestep a token (i2v), real coordinates, random embeddings."""
    config = model.config
    generator = torch.Generator(device).manual_seed(0)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=model.dtype)

    frames, rows, columns = counts.grid
    timestep = torch.full((1, counts.video), 725.0, device=device)
    timestep[:, : rows * columns] = 0.0
    sigma = torch.full((1,), 725.0, device=device)
    return {
        "hidden_states": noise(1, counts.video, config.in_channels),
        "audio_hidden_states": noise(1, counts.audio, config.audio_in_channels),
        "encoder_hidden_states": noise(1, prompt_tokens, config.cross_attention_dim),
        "audio_encoder_hidden_states": noise(1, prompt_tokens, config.audio_cross_attention_dim),
        "timestep": timestep,
        "audio_timestep": sigma,
        "sigma": sigma,
        "num_frames": frames,
        "height": rows,
        "width": columns,
        "fps": 24.0,
        "audio_num_frames": counts.audio,
        "video_coords": model.rope.prepare_video_coords(1, frames, rows, columns, device, fps=24.0),
        "audio_coords": model.audio_rope.prepare_audio_coords(1, counts.audio, device),
        "use_cross_timestep": True,
        "return_dict": False,
    }


def interleaved(calls: dict[str, Callable[[], Any]], *, rounds: int, device: torch.device) -> dict[str, list[float]]:
    """Milliseconds of every call, all variants in turn in each round, device idle before and after."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            synchronize(device)
            start = time.perf_counter()
            call()
            synchronize(device)
            times[name].append((time.perf_counter() - start) * 1e3)
    return times


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def relative_l2(got: torch.Tensor, want: torch.Tensor) -> float:
    return ((got.float() - want.float()).norm() / want.float().norm()).item()


def with_the_same_weights(model: Any) -> Any:
    """A second model whose parameters are the first one's."""
    return copy.deepcopy(model, memo={id(parameter): parameter for parameter in model.parameters()})


def without_transfers(call: Callable[[], Any]) -> Callable[[], Any]:
    """The same work on this rank's own numbers: what it computes is wrong, and nothing is sent."""

    def run() -> Any:
        with mock.patch.object(ulysses, "start_all_to_all", lambda x, group: x.clone()):
            return call()

    return run


@torch.inference_mode()
def bench(arguments: argparse.Namespace, state: ParallelState) -> dict[str, Any]:
    """Rows of every stage and variant."""
    device, dtype = state.device, torch.bfloat16 if state.device.type == "cuda" else torch.float32
    config = component_config("transformer", {"num_layers": arguments.num_layers} if arguments.num_layers else None)
    backend = select_backend(
        arguments.attention_backend,
        device=device,
        dtype=dtype,
        head_dim=config["attention_head_dim"],
        needs_lse=state.ring_degree > 1,
    )
    torch.manual_seed(0)
    models: dict[str, Any] = {"stock": build_component("transformer", config, device=device, dtype=dtype)}
    names = ["eager", "compiled"]
    if state.sequence_degree > 1:
        names += [ALONE, *([NO_TRANSFERS] if state.ring_degree == 1 else [])]
    for name in names:
        models[name] = with_the_same_weights(models["stock"])
        parallelize(models[name], ParallelState() if name == ALONE else state, backend=backend)
        if name != "eager":
            compile_blocks(models[name])
    rows: list[dict[str, Any]] = []
    result = {
        **environment(device),
        "dtype": str(dtype).removeprefix("torch."),
        "ulysses_degree": state.ulysses_degree,
        "ring_degree": state.ring_degree,
        "layers": config["num_layers"],
        "prompt_tokens": arguments.prompt_tokens,
        "rows": rows,
    }
    stages = token_counts(
        DISTILLED, height=arguments.height, width=arguments.width, num_frames=arguments.num_frames, frame_rate=24.0
    )
    for stage, counts in enumerate(stages, 1):
        inputs = make_inputs(models["stock"], counts, prompt_tokens=arguments.prompt_tokens, device=device)
        want = models["stock"](**inputs)
        errors, compiling = {}, {}
        calls: dict[str, Callable[[], Any]] = {n: functools.partial(model, **inputs) for n, model in models.items()}
        if NO_TRANSFERS in calls:
            calls[NO_TRANSFERS] = without_transfers(calls[NO_TRANSFERS])
        for name in names:
            before = compile_seconds()
            got = calls[name]()
            compiling[name] = compile_seconds() - before
            if name == NO_TRANSFERS:
                continue
            errors[name] = max(relative_l2(g, w) for g, w in zip(got, want, strict=True))
            if not errors[name] <= TOLERANCE:
                raise SystemExit(
                    f"stage {stage}, {name}: relative L2 {errors[name]:.1e} to the stock forward; not timed"
                )
        for name, times in interleaved(calls, rounds=arguments.rounds, device=device).items():
            rows.append(
                {
                    "stage": stage,
                    "variant": name,
                    "attention_backend": "stock" if name == "stock" else backend.name,
                    "video_tokens": counts.video,
                    "audio_tokens": counts.audio,
                    "median_ms": statistics.median(times),
                    "min_ms": min(times),
                    "max_ms": max(times),
                    "relative_l2": errors.get(name),
                    "compile_seconds": compiling.get(name),
                }
            )
        if arguments.out and state.rank == 0:  # after every stage: the time on a machine may end before the second
            arguments.out.parent.mkdir(parents=True, exist_ok=True)
            arguments.out.write_text(json.dumps(result, indent=2) + "\n")
    return result


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--height", type=at_least(1), default=1024, help="pixels (default: 1024)")
    parser.add_argument("--width", type=at_least(1), default=1536, help="pixels (default: 1536)")
    parser.add_argument("--num_frames", type=at_least(1), default=121)
    parser.add_argument("--prompt_tokens", type=at_least(1), default=1024)
    parser.add_argument(
        "--num_layers", type=at_least(1), help="fewer blocks than the released 48, to try the script out"
    )
    parser.add_argument("--attention_backend", help="kernel of the video self-attention (default: torch's own)")
    parser.add_argument("--ulysses_degree", type=at_least(1), default=1)
    parser.add_argument("--ring_degree", type=at_least(1), default=1)
    parser.add_argument("--rounds", type=at_least(1), default=7)
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda; cpu where --num_layers finds no GPU")
    parser.add_argument("--out", type=output_file, help="also write the JSON here")
    arguments = parser.parse_args(argv)
    small = arguments.num_layers is not None
    arguments.device = check_device(parser, arguments.device, small=small, instead="give --num_layers 1")
    return arguments


def main() -> None:
    arguments = parse()
    degrees = {"ulysses_degree": arguments.ulysses_degree, "ring_degree": arguments.ring_degree}
    with distributed.start(**degrees, device=arguments.device) as session:
        result = bench(arguments, session.state)
        if session.state.rank:
            return
        stock = {row["stage"]: row["median_ms"] for row in result["rows"] if row["variant"] == "stock"}
        print(f"{result['device']}, {result['dtype']}, {result['layers']} layers, torch {result['versions']['torch']}")
        print(f"{'stage':>5} {'variant':<22} {'tokens':>7} {'median ms':>10} {'min':>8} {'max':>8} {'x stock':>8}  L2")
        for row in result["rows"]:
            error = "" if row["relative_l2"] is None else f"{row['relative_l2']:.1e}"
            print(
                f"{row['stage']:>5} {row['variant']:<22} {row['video_tokens']:>7} {row['median_ms']:>10.1f} "
                f"{row['min_ms']:>8.1f} {row['max_ms']:>8.1f} {stock[row['stage']] / row['median_ms']:>8.2f}  {error}"
            )
        print(json.dumps(result))


if __name__ == "__main__":
    main()
