"""Where a figure comes from: device, versions, commit, command and date, in every json this project writes."""

import functools
import logging
import os
import platform
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from runner.metrics import device_name

logger = logging.getLogger(__name__)

COMMIT_VARIABLE = "LTX_RUNNER_COMMIT"
"""The commit of a source tree that was copied without its .git, to a machine or into an image."""
_VERSIONED = ("torch", "triton", "diffusers", "transformers", "xfuser", "yunchang", "av")


def environment(device: torch.device) -> dict[str, Any]:
    """JSON types only."""
    versions = {"python": platform.python_version(), "cuda": torch.version.cuda, "hip": torch.version.hip}
    for package in _VERSIONED:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = None
    return {
        "device": device_name(device),
        "versions": versions,
        "commit": _commit(),
        "command": launch_command(sys.argv, os.environ),
        "date": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }


def launch_command(argv: Sequence[str], environ: Mapping[str, str]) -> list[str]:
    """The command line that starts this again, from the top of the repository, without its torchrun rendezvous."""
    script = Path(argv[0])
    module = script.name == "__main__.py"
    program = ["-m", script.parent.name] if module else [os.path.relpath(script)]
    if "TORCHELASTIC_RUN_ID" in environ:
        return ["torchrun", f"--nproc_per_node={environ['LOCAL_WORLD_SIZE']}", *program, *argv[1:]]
    return ["python", *program, *argv[1:]]


@functools.cache
def _commit() -> str | None:
    """What COMMIT_VARIABLE says, for a copy of the sources; else the commit of this source tree, with "-dirty" after
    local changes. None where neither is known.
    """
    root = Path(__file__).resolve().parents[1]
    if COMMIT_VARIABLE in os.environ or not (root / ".git").exists():
        return os.environ.get(COMMIT_VARIABLE) or None
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError) as error:
        logger.info("commit unknown: %s", error)
        return None
