"""Types of the bench scripts' flags: what argparse lets through and a run would stumble over, minutes later."""

import argparse
import math
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch


def at_least(lowest: int, *, multiple_of: int = 1) -> Callable[[str], int]:
    """An integer from `lowest` on."""

    def integer(text: str) -> int:
        words = f"{lowest} or more" + (f", a multiple of {multiple_of}" if multiple_of > 1 else "")
        try:
            value = int(text)
        except ValueError:
            value = lowest - 1
        if value < lowest or value % multiple_of:
            raise argparse.ArgumentTypeError(f"{text} is not an integer of {words}")
        return value

    return integer


def number(text: str) -> float:
    """Any finite number: with NaN every comparison is false, so that a limit would hold."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"{text} is not a finite number")
    return value


def seconds(text: str) -> float:
    """A budget above 0."""
    value = number(text)
    if value <= 0:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return value


def check_device(parser: argparse.ArgumentParser, device: str | None, *, small: bool, instead: str) -> str:
    """The device of a bench of the released size: the GPU; a CPU only where it is asked for or the work is `small`."""
    gpu = torch.cuda.is_available()
    if device == "cuda" and not gpu:
        parser.error("--device cuda: torch sees no GPU here; give cpu")
    if device is None and not gpu and not small:
        parser.error(f"torch sees no GPU, and a CPU needs hours for the released size: {instead}, or --device cpu")
    return device or ("cuda" if gpu else "cpu")


def output_file(text: str) -> Path:
    """A file that can be written: its folder is made and tried now, not after the measurements."""
    path = Path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is a folder; give a file")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        reason = "it is a file" if isinstance(error, FileExistsError) else error.strerror
        raise argparse.ArgumentTypeError(f"{text} cannot be written ({path.parent}: {reason})") from error
    return path
