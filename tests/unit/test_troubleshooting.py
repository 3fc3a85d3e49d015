"""Every line that docs/troubleshooting.md quotes is one that the code can print."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LEAST, SHARE = 10, 0.25
"""Letters, and share of the letters, that must be the code's own: a text of values alone would match any line."""


def _parts(node: ast.AST) -> list[str] | None:
    """The fixed parts of a text, between the values put into it."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return re.split(r"%(?:\.\d+)?[sdfg]", node.value)
    if isinstance(node, ast.JoinedStr):
        parts = [""]
        for value in node.values:
            if isinstance(value, ast.Constant):
                parts[-1] += str(value.value)
            else:
                parts.append("")
        return parts
    return None


@cache
def texts() -> list[list[str]]:
    found = []
    for package in ("layers", "runner_models", "runner"):
        for path in (ROOT / package).rglob("*.py"):
            found += [parts for node in ast.walk(ast.parse(path.read_text())) if (parts := _parts(node))]
    return found


def can_print(quoted: str, parts: list[str]) -> bool:
    """Whether the text with some values is `quoted`, or begins as it does where that ends in `...`."""
    begun = quoted.removesuffix("...")
    whole = begun == quoted
    least = max(LEAST, len(begun) * SHARE)
    if not whole and parts[0].startswith(begun):
        return len(begun) >= least
    if not begun.startswith(parts[0]):
        return False
    position = matched = len(parts[0])
    for index, part in enumerate(parts[1:], start=1):
        last = whole and index == len(parts) - 1
        found = len(begun) - len(part) if last else begun.find(part, position)
        if found < position or not begun.startswith(part, found):
            return not whole and matched + _begins(begun[position:], part) >= least
        position, matched = found + len(part), matched + len(part)
    return matched >= least and (position == len(begun) or (not whole and " " not in begun[position:].strip()))


def _begins(rest: str, part: str) -> int:
    """Letters of `part` that `rest` ends with, after a value; a value alone, which may be anything, has no space."""
    cut = next((cut for cut in range(len(part), 1, -1) if rest.endswith(part[:cut])), 0)
    return cut if cut or " " not in rest.strip() else -len(rest)


def quoted_lines() -> list[str]:
    page = (ROOT / "docs" / "troubleshooting.md").read_text().split("## Said by others")[0]
    return [row[1] for row in re.finditer(r"^\| `(.+?)` \|", page, re.MULTILINE)]


def test_there_are_lines() -> None:
    assert len(quoted_lines()) > 30


@pytest.mark.parametrize("quoted", quoted_lines())
def test_the_code_says_it(quoted: str) -> None:
    assert any(can_print(quoted, parts) for parts in texts())


@pytest.mark.parametrize(
    "invented",
    [
        "--num_frames 120 is not 8*k+1; the nearest valid counts are 113 or 121.",
        "out of luck: ...",
        "the cat sat on the mat",
        "--output_directory /x cannot be painted (no): ...",
        "decoder attention: triton accepted: ...",
    ],
)
def test_an_invented_line_is_noticed(invented: str) -> None:
    assert not any(can_print(invented, parts) for parts in texts())
