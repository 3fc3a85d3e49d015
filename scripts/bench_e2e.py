#!/usr/bin/env python3
"""Time whole requests, prompt to frames to file: this runner, stock diffusers, xfuser's runner, in one run.

    python scripts/bench_e2e.py --variants ours stock xfuser --out benchmarks/e2e.json
    torchrun --nproc_per_node=2 scripts/bench_e2e.py --ulysses_degree 2 --use_parallel_vae --variants ours xfuser
    python scripts/bench_e2e.py --model tiny --height 256 --width 256 --num_frames 17     # any CPU

Takes every flag of the runner beside its own. Defaults: the released architecture with random weights made on the
device (--load_format auto reads real ones), i2v from docs/assets/demo_cat.jpg, --num_iterations 3. A variant is ours,
stock or xfuser, with options of its own: ours:vae_decode=tiled,decoder_attention=sdpa. All share one copy of the
weights and are interleaved; --in_turn holds one at a time. The peers decode in their tiles (on one rank
they need to): xfuser:enable_tiling=false asks for the whole clip.

Every variant is verified before it is timed, and that is its warm-up: shapes, finite sound, frames that are no
constant, the transformer's calls and tokens, final latents near the first variant's; the decoder's queries are counted.
Stages are those of the runner, the device idle at both ends of each; slowest rank. Frames go to the saving rank during
video_decode; mux is what the file takes after it. A variant that cannot run has a row that says why. --out is written
after every step. The table is followed by one line of JSON, the last of stdout.
"""

import argparse
import json
import logging
import os
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(1, str(Path(__file__).resolve().parents[1]))  # also where the project is not installed
if "rocm" not in version("torch"):  # as the runner does, before torch is imported
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")

import torch
from arguments import output_file, seconds
from e2e_report import check_result, rows, table
from e2e_variants import Variant, Verified, Weights, build, parse_variant, scratch

from runner import cli, distributed
from runner.config import RunConfig
from runner.distributed import Session
from runner.engine import make_requests, resolve_source
from runner.environment import environment
from runner.errors import UsageError
from runner.preflight import check_memory, preflight
from runner.sidecar import write_json
from runner_models import TINY_NAMES, split_folder
from runner_models.api import SetupError, VideoRequest
from runner_models.ltx2.load import load

IMAGE = Path(__file__).resolve().parents[1] / "docs/assets/demo_cat.jpg"
RESERVE_SECONDS = 15
GIB = 2**30
logger = logging.getLogger("bench_e2e")


def parse(argv: list[str]) -> tuple[argparse.Namespace, RunConfig]:
    """This script's flags, and the run that all others describe. Raises UsageError."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--variants", nargs="+", default=["ours"], metavar="NAME[:FLAG=VALUE,...]")
    parser.add_argument("--to_file", choices=("none", "first", "all"), default="first", help="rounds that write a file")
    parser.add_argument("--in_turn", action="store_true", help="all rounds of one variant before the next is built")
    parser.add_argument("--seconds", type=seconds, default=380, help="budget of the whole run (default: 380)")
    parser.add_argument("--out", type=output_file, help="also write the JSON here")
    arguments, rest = parser.parse_known_args(argv)
    given = {argument[2:].partition("=")[0].replace("-", "_") for argument in rest if argument.startswith("--")}
    for name in ("profile", "dry_run", "doctor", "output_directory"):
        if name in given:
            raise UsageError(f"--{name} has no effect on this script, which keeps --out alone; use python -m runner.")
    defaults = {"model": "LTX-2.5", "task": "i2v", "prompt": "a cat dancing at sunset", "num_iterations": "3"}
    for name, value in defaults.items():
        if name not in given and "config" not in given and "from_json" not in given:
            rest += [f"--{name}", value]
    config = cli.parse(rest)
    if len(config.prompt) > 1:
        raise UsageError(f"--prompt has {len(config.prompt)} texts and this script times one request; give one.")
    images: list[str] = []
    if config.task == "i2v" and not config.input_images:
        images = ["--input_images", os.path.relpath(IMAGE), "--resize_input_images"]
    has_weights = config.model in TINY_NAMES or split_folder(config.model)[0].is_dir()
    dummy = [] if has_weights or "load_format" in given else ["--load_format", "dummy"]
    return arguments, cli.parse([*rest, *images, *dummy])


class Bench:
    """The run, its weights, and what was measured so far."""

    def __init__(
        self, arguments: argparse.Namespace, config: RunConfig, variants: list[Variant], session: Session
    ) -> None:
        self.arguments, self.config, self.variants, self.session = arguments, config, variants, session
        self.started = time.perf_counter()
        self.request: VideoRequest = session.broadcast_object(
            make_requests(config)[0] if session.state.rank == 0 else None
        )
        self.weights = self._load()
        self.first: Verified | None = None

    def _load(self) -> Weights:
        config, state = self.config, self.session.state
        source = resolve_source(config, self.session)
        started = time.perf_counter()
        dtype = getattr(torch, config.dtype)
        parts = load(source, config.recipe, device=state.device, dtype=dtype, offload=config.enable_model_cpu_offload)
        parts.pipeline.set_progress_bar_config(disable=True)
        if state.device.type == "cuda":
            torch.cuda.synchronize(state.device)
        self.session.barrier("loaded")
        seconds = time.perf_counter() - started
        self.say(f"weights in {seconds:.1f} s")
        modules = [m for m in parts.pipeline.components.values() if isinstance(m, torch.nn.Module)]
        modules += [m for m in (parts.latent_upsampler, parts.diffusion_decoder) if m is not None]
        self.result: dict[str, Any] = {
            **environment(state.device),
            "benchmark": "e2e",
            "config": config.to_json(),
            "dtype": config.dtype,
            "ranks": state.world_size,
            "ulysses_degree": state.ulysses_degree,
            "ring_degree": state.ring_degree,
            "data_parallel_degree": state.data_parallel_degree,
            "random_weights": source.random_weights,
            "weights_gib": sum(p.nbytes for module in modules for p in module.parameters()) / GIB,
            "load_seconds": seconds,
            "rows": [],
        }
        return Weights(parts, source)

    def say(self, text: str) -> None:
        """Progress, on stderr."""
        if self.session.state.rank == 0:
            print(f"[{time.perf_counter() - self.started:6.1f} s] {text}", file=sys.stderr, flush=True)

    def save(self) -> None:
        """Write what there is."""
        if self.session.state.rank:
            return
        self.result["rows"] = rows(self.variants)
        self.result["seconds_in_all"] = time.perf_counter() - self.started
        if self.arguments.out:
            self.arguments.out.parent.mkdir(parents=True, exist_ok=True)
            write_json(self.arguments.out, self.result)

    def has_time(self, seconds: float) -> bool:
        """Whether another `seconds` fit into the budget; the same on every rank."""
        reserve = RESERVE_SECONDS if self.session.state.device.type == "cuda" else 0
        left = self.arguments.seconds - (time.perf_counter() - self.started)
        return self.session.broadcast_object(left > seconds + reserve)

    def everywhere(self, error: str | None) -> str | None:
        """The first error of any rank."""
        return next(filter(None, self.session.state.all_gather_object(error)), None)

    def prepare(self, variant: Variant) -> bool:
        """Build and verify one variant; whether it may be timed."""
        error: str | None = None
        started = time.perf_counter()
        try:
            variant.contestant = build(variant, self.weights, self.request, self.session)
        except Exception as problem:  # noqa: BLE001  # a peer may raise anything: its words are the row's
            error = self._refused(variant, problem)
        variant.row["build_seconds"] = time.perf_counter() - started
        error = self.everywhere(error)
        if error is None:
            assert variant.contestant is not None
            variant.row["compile_seconds"] = variant.contestant.compile_seconds
            self.say(f"{variant.spec}: built in {variant.row['build_seconds']:.1f} s")
            started = time.perf_counter()
            try:
                error = self._verify(variant)
            except Exception as problem:  # noqa: BLE001  # as above
                error = self._refused(variant, problem)
            variant.row["first_request_seconds"] = time.perf_counter() - started
            error = self.everywhere(error)
            variant.row["chosen"] = variant.contestant.describe()
        if error is not None:
            variant.row["error"] = error
            self.drop(variant)
        self.say(f"{variant.spec}: {error or 'verified'}")
        self.save()
        return error is None

    def _refused(self, variant: Variant, problem: Exception) -> str:
        """The error of a row. A fault of ours, and what other ranks would wait for, ends the run instead."""
        ours = variant.name == "ours" and not isinstance(problem, SetupError | torch.OutOfMemoryError)
        if ours or (isinstance(problem, torch.OutOfMemoryError) and self.session.state.world_size > 1):
            raise problem
        if not isinstance(problem, SetupError | ImportError | NotImplementedError):
            logger.info("%s", variant.spec, exc_info=problem)
        return f"{type(problem).__name__}: {str(problem).strip().splitlines()[0] if str(problem).strip() else ''}"

    def _verify(self, variant: Variant) -> str | None:
        """What is wrong with a first request; it is the reference of those that follow if there is none yet."""
        assert variant.contestant is not None
        verified = variant.contestant.verify()
        queries = sum(self.session.state.all_gather_object(verified.work.decoder_queries))
        found, wrong = check_result(verified, self.request, self.config, first=self.first, leads=self._leads)
        variant.row["work"] = {**found, "decoder_queries": queries}
        if wrong is None and self.first is None:
            self.first = Verified(None, None, verified.work)
        return wrong

    @property
    def _leads(self) -> bool:
        return self.session.state.rank == 0

    def measure(self, variants: list[Variant]) -> None:
        """Rounds of these in turn, while there is time."""
        config = self.config
        rounds = range(-config.warmup_calls, config.num_iterations)
        for round_ in rounds:
            to_file = round_ >= 0 and (
                self.arguments.to_file == "all" or (self.arguments.to_file, round_) == ("first", 0)
            )
            for variant in variants:
                assert variant.contestant is not None
                last = variant.samples[-1].total_seconds if variant.samples else variant.row["first_request_seconds"]
                if not self.has_time(last * (2.0 if to_file else 1.2)):
                    self.say(f"{variant.spec}: no time for round {round_ + 1}")
                    variant.row["cut_short"] = True
                    continue
                with scratch() as folder:
                    samples, seconds = variant.contestant.round(round_, folder if to_file else None)
                if round_ >= 0 and samples:
                    variant.samples += samples
                    variant.to_file_seconds += [seconds] if to_file else []
                self.say(f"{variant.spec}: round {round_ + 1} of {config.num_iterations}, {seconds:.2f} s")
                self.save()

    def drop(self, variant: Variant) -> None:
        """Let go of a variant's memory, not of the shared weights."""
        if variant.contestant is not None:
            variant.contestant.close()
            variant.contestant = None
        if self.session.state.device.type == "cuda":
            torch.cuda.empty_cache()


def make_variants(specs: list[str], config: RunConfig) -> list[Variant]:
    """Raises UsageError for what cannot be."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    world = int(os.environ.get("WORLD_SIZE", "1"))
    variants = [parse_variant(spec, config, world_size=world, gpus=gpus) for spec in specs]
    if config.enable_model_cpu_offload and specs != ["ours"]:
        raise UsageError("--enable_model_cpu_offload moves the weights that variants share; give --variants ours.")
    return variants


def run(bench: Bench) -> None:
    """Verify, then time: all variants together, or one after the other."""
    together = [bench.variants] if not bench.arguments.in_turn else [[variant] for variant in bench.variants]
    for variants in together:
        good = [variant for variant in variants if bench.prepare(variant)]
        bench.measure(good)
        for variant in good:
            bench.drop(variant)
    bench.save()


def main() -> int:
    rank = int(os.environ.get("RANK", "0"))
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    for name in ("runner", "runner_models", "layers", "bench_e2e"):
        logging.getLogger(name).setLevel(logging.INFO if rank == 0 else logging.WARNING)
    try:
        arguments, config = parse(sys.argv[1:])
        config = preflight(config)
        variants = make_variants(arguments.variants, config)
        check_memory(config)
        degrees = {name: getattr(config, f"{name}_degree") for name in ("ulysses", "ring", "data_parallel")}
        named = {f"{name}_degree": degree for name, degree in degrees.items()}
        with distributed.start(**named, device=config.device) as session:
            bench = Bench(arguments, config, variants, session)
            run(bench)
            if rank == 0:
                print(table(bench.result))
                print(json.dumps(bench.result))
    except (UsageError, SetupError) as error:
        if rank == 0:
            print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        if error.filename is None:
            raise
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
