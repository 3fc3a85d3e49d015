"""Where results go: the output folder, free names in it, and json files that are never half-written."""

import json
import os
import shutil
import tempfile
import uuid
from itertools import count
from pathlib import Path
from typing import Any

from runner.errors import UsageError, user_path
from runner.sizes import readable


def partial_path(path: Path) -> Path:
    """The hidden name beside `path` that holds the file until it is complete."""
    return path.with_name(f".{path.name}.part")


def check_output_directory(path: str | Path, *, needed_bytes: int) -> Path:
    """Create the output folder and make sure that the results will fit, before any weight is read.

    Args:
        path: the value of --output_directory; `~` is expanded, missing parents are made.
        needed_bytes: what the run is going to write, in bytes.

    Returns:
        The folder.

    Raises:
        UsageError: it cannot be created, a file cannot be written in it, or its disk has less than `needed_bytes` free.
    """
    directory = user_path(str(path), f"--output_directory {path}")
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=directory, prefix=".writable_") as probe:
            probe.write(bytes(4096))
            probe.flush()
        free = shutil.disk_usage(directory).free
    except OSError as error:
        reason = "it is a file" if isinstance(error, FileExistsError) else error.strerror
        raise UsageError(
            f"--output_directory {path} cannot be written ({reason}); give a folder that exists or can be created, "
            "with permission to write"
        ) from error
    if free < needed_bytes:
        raise UsageError(
            f"--output_directory {path} has {readable(free)} free and the results need {readable(needed_bytes)}; "
            "free some space or give a folder on another disk"
        )
    return directory


def output_path(directory: Path, stem: str) -> Path:
    """Reserve a name for a video: `{stem}.mp4`, or the first of `{stem}_1.mp4`, `{stem}_2.mp4`, ... that is free.

    A name is free when neither its .mp4 nor its .json exists and no process has reserved it. The reservation is the
    empty file `partial_path(result)`, created with O_EXCL: `VideoWriter` fills it, and renames or removes it. Call this
    right before the writer is entered; a process killed in between leaves the empty file and the next run takes the
    next name.

    Raises:
        OSError: the reservation cannot be created.
    """
    for suffix in count():
        path = directory / (f"{stem}_{suffix}.mp4" if suffix else f"{stem}.mp4")
        try:
            os.close(os.open(partial_path(path), os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
        except FileExistsError:
            continue
        # After the reservation, not before: another process may have finished this very name in between.
        if not path.exists() and not path.with_suffix(".json").exists():
            return path
        partial_path(path).unlink()
    raise AssertionError("unreachable")


def write_json(path: Path, obj: Any) -> None:
    """Write `obj` as indented json with sorted keys, under a temporary name that is renamed once complete.

    Raises:
        ValueError: `obj` holds a NaN or an infinity, which json has no word for.
        TypeError: `obj` holds something json cannot express.
        OSError: the file cannot be written. An older `path` is left as it was in every case.
    """
    text = json.dumps(obj, indent=2, sort_keys=True, allow_nan=False, ensure_ascii=False) + "\n"
    partial = path.with_name(f".{path.name}.{uuid.uuid4().hex}.part")
    try:
        with partial.open("x", encoding="utf-8") as file:
            file.write(text)
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
