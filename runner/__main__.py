"""`python -m runner` and `torchrun -m runner`: parse, run, tear down.

Exit codes: 0 done, 1 a failure, 2 something the user can mend (one line, no traceback), 130 interrupted. Of --doctor: 0
this run would work here, 1 it would not.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import warnings
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

from runner.errors import UsageError

if TYPE_CHECKING:
    from runner.cli import CommandLine
    from runner.config import RunConfig


def main(argv: list[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    if sys.stderr is None:  # started with it closed
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    _configure_logging()
    _configure_allocator()
    from runner import cli
    from runner.config import RunConfig

    try:
        _check_launcher()
        asked = cli.read(sys.argv[1:] if argv is None else argv)
        if asked.doctor:
            return _examine(asked)
        # torch and diffusers take seconds to import: a mistyped flag has been answered by now.
        return _run(RunConfig.from_values(asked.values))
    except UsageError as error:
        return _refuse(error)
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # --dry_run | head
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _examine(asked: CommandLine) -> int:
    from runner import doctor

    if _rank():
        return 0
    report = doctor.examine(asked.values)
    print(json.dumps(report, indent=2) if asked.json else doctor.render(report), flush=True)
    return 0 if report["works"] else 1


def _run(config: RunConfig) -> int:
    import torch
    import torch.distributed as dist

    from runner import distributed, engine
    from runner.plan import render
    from runner.preflight import make_plan, preflight
    from runner_models.api import SetupError

    if config.dry_run:
        if _rank() == 0:
            print(render(make_plan(config)), flush=True)
        return 0
    config = preflight(config)
    try:
        with distributed.start(
            ulysses_degree=config.ulysses_degree,
            ring_degree=config.ring_degree,
            data_parallel_degree=config.data_parallel_degree,
            device=config.device,
            describe=_describe,
        ) as session:
            engine.run(config, session)
    except (UsageError, SetupError, torch.OutOfMemoryError, dist.DistError, OSError, KeyboardInterrupt) as error:
        # One process: with more, leaving the session has ended all of them.
        text, code = _describe(error)
        print(f"error: {text}", file=sys.stderr)
        return code
    return 0


def _describe(error: BaseException) -> tuple[str, int]:
    """What to print and the exit code: one line for what the user can mend, a traceback for a fault of ours."""
    import torch
    import torch.distributed as dist

    from runner.distributed import describe_failure
    from runner_models.api import SetupError

    if isinstance(error, UsageError | SetupError):
        return str(error), 2
    if isinstance(error, torch.OutOfMemoryError):
        return f"out of memory: {error}", 1
    if isinstance(error, ConnectionError | dist.DistError):
        return f"lost the other ranks: {str(error).splitlines()[0]}", 1
    if isinstance(error, OSError) and error.filename is not None:
        return str(error), 1
    return describe_failure(error)


def _refuse(error: ValueError) -> int:
    if _rank() == 0:
        for line in str(error).splitlines():
            print(f"error: {line}", file=sys.stderr)
    return 2


def _rank() -> int:
    rank = os.environ.get("RANK", "0")
    return int(rank) if rank.isdecimal() else 0


def _check_launcher() -> None:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        value = os.environ.get(name, "0")
        if not value.isdecimal():
            raise UsageError(f"{name}={value} in the environment is not a count; unset it, or start with torchrun.")


def _configure_logging() -> None:
    rank = _rank()
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    for package in ("runner", "runner_models", "layers"):
        logging.getLogger(package).setLevel(logging.INFO if rank == 0 else logging.WARNING)
    if rank or not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    # Deprecations inside diffusers and transformers, which say nothing to a user of this program.
    warnings.filterwarnings("ignore", category=FutureWarning)


def _configure_allocator() -> None:
    """Let CUDA's allocator grow its segments: without it 8.6 GiB of an H200 were lost to fragments at 1536x1024x121 and
    i2v ran out of memory. ROCm does not know the setting. Read by torch when it is imported, which is later.
    """
    try:
        rocm = "rocm" in version("torch")
    except PackageNotFoundError:  # --doctor says so
        return
    if not rocm:
        os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")


if __name__ == "__main__":
    sys.exit(main())
