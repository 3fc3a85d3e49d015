"""`python -m runner` and `torchrun -m runner`: parse, run, tear down.

Exit codes: 0 done, 1 a failure, 2 something the user can mend (one line, no traceback).
"""

from __future__ import annotations

import logging
import os
import sys
import warnings
from typing import TYPE_CHECKING

from runner.errors import UsageError

if TYPE_CHECKING:
    from runner.config import RunConfig


def main(argv: list[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    _configure_logging()
    from runner import cli

    try:
        config = cli.parse(sys.argv[1:] if argv is None else argv)
        # torch and diffusers take seconds to import: a mistyped flag has been answered by now.
        return _run(config)
    except UsageError as error:
        return _refuse(error)


def _run(config: RunConfig) -> int:
    import torch

    from runner import engine
    from runner.plan import render
    from runner.preflight import make_plan, preflight
    from runner_models.api import CheckpointError

    if config.dry_run:
        if _rank() == 0:
            print(render(make_plan(config)))
        return 0
    try:
        engine.run(preflight(config))
    except CheckpointError as error:
        return _refuse(error)
    except torch.OutOfMemoryError as error:
        print(f"error: out of memory: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr)
        return 1
    return 0


def _refuse(error: ValueError) -> int:
    if _rank() == 0:
        for line in str(error).splitlines():
            print(f"error: {line}", file=sys.stderr)
    return 2


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))


def _configure_logging() -> None:
    rank = _rank()
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    for package in ("runner", "runner_models", "layers"):
        logging.getLogger(package).setLevel(logging.INFO if rank == 0 else logging.WARNING)
    if rank or not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    # Deprecations inside diffusers and transformers; ours are errors in the tests.
    warnings.filterwarnings("ignore", category=FutureWarning)


if __name__ == "__main__":
    sys.exit(main())
