"""Prompts from a file."""

import csv
import io

from runner.errors import UsageError, user_path

COLUMN = "prompt"


def read_prompts(path: str) -> tuple[str, ...]:
    """Prompts of `--dataset_path`: the column `prompt` of a .csv (xfuser's format), else one a line.

    Blank lines of a text file are left out. The file is UTF-8, with or without a byte-order mark.

    Raises:
        UsageError: the file cannot be read or decoded, has no such column, holds a blank prompt, or holds none.
    """
    name = f"--dataset_path {path}"
    try:
        text = user_path(path, name).read_bytes().decode("utf-8-sig")
    except FileNotFoundError as error:
        raise UsageError(f"{name} does not exist; give a .csv or a text file.") from error
    except OSError as error:
        raise UsageError(f"{name} cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{name} is not UTF-8 text (byte {error.start}); save it as UTF-8.") from error
    if path.lower().endswith(".csv"):
        prompts = _csv_prompts(text, name)
    else:
        prompts = [line.strip() for line in io.StringIO(text, newline=None) if line.strip()]
    if not prompts:
        raise UsageError(f"{name} holds no prompt.")
    return tuple(prompts)


def _csv_prompts(text: str, name: str) -> list[str]:
    try:
        rows = csv.DictReader(io.StringIO(text, newline=""), strict=True)
        columns = list(rows.fieldnames or ())
        if not columns:
            raise UsageError(f"{name} is empty; its first line must name the columns, one of them `{COLUMN}`.")
        if COLUMN not in columns:
            raise UsageError(f"{name} has no column `{COLUMN}`; it has {', '.join(columns)}.")
        prompts = []
        for row in rows:
            if None in row:
                raise UsageError(
                    f"{name} has more fields in line {rows.line_num} than columns; put a prompt with commas in quotes."
                )
            prompt = (row[COLUMN] or "").strip()
            if not prompt:
                raise UsageError(f"{name} has a blank prompt in line {rows.line_num}.")
            prompts.append(prompt)
    except csv.Error as error:
        raise UsageError(f"{name} is not a valid csv file: {error}.") from error
    return prompts
