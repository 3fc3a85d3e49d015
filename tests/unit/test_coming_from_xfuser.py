"""docs/coming-from-xfuser.md against the flags of xfuser 0.7.0 and of this runner, so that it cannot rot.

UPDATE_DOCS=1 writes the tables that are made from the code instead of checking them.
"""

import re
from pathlib import Path

import pytest

from runner.flags import FLAGS, NOT_IN_FILES
from runner.xfuser_flags import UNSUPPORTED
from tests.unit.docs_tables import check_table
from tests.unit.runner.test_cli import XFUSER_FLAGS

PAGE = Path(__file__).parents[2] / "docs" / "coming-from-xfuser.md"
THEIRS = {entry.partition("=")[0].replace("-", "_") for entry in XFUSER_FLAGS}


def refused_table() -> str:
    """Names by advice, in the code's order; the value that is accepted behind the name."""
    by_advice: dict[str, list[str]] = {}
    for name, (neutral, advice) in UNSUPPORTED.items():
        if name in THEIRS:
            by_advice.setdefault(advice, []).append(f"`--{name}`" + (f" ({neutral})" if neutral else ""))
    rows = [f"| {', '.join(names)} | {advice} |" for advice, names in by_advice.items()]
    return "\n".join(["| flag (the value that is accepted) | instead |", "| --- | --- |", *rows])


def own_table() -> str:
    rows = [
        f"| `--{name}` | {flag.help.replace('|', chr(92) + '|')} |"
        for name, flag in FLAGS.items()
        if name not in THEIRS
    ]
    return "\n".join(["| flag | |", "| --- | --- |", *rows])


@pytest.mark.parametrize(
    ("name", "table"), [("refused", refused_table()), ("own", own_table())], ids=["refused", "own"]
)
def test_tables_made_from_the_code(name: str, table: str) -> None:
    check_table(PAGE, name, table)


def taken() -> dict[str, list[str]]:
    section = PAGE.read_text().split("## Flags taken")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `--(\w+)` \|(.*?)\|(.*?)\|$", section, re.MULTILINE)
    return {name: [there.strip(), here.strip()] for name, there, here in rows}


def test_every_flag_of_xfuser_is_taken_or_refused() -> None:
    assert set(taken()) == THEIRS & set(FLAGS)
    assert set(taken()) | (THEIRS & set(UNSUPPORTED)) == THEIRS


def test_what_is_said_of_the_flags_holds() -> None:
    rows = taken()
    for name, (there, _) in rows.items():
        if re.fullmatch(r"\d+", there):
            assert FLAGS[name].default == int(there), name
    text = PAGE.read_text()
    for flag in re.findall(r"--([a-z][a-z0-9_]+)", text):
        known = {*FLAGS, *UNSUPPORTED, *NOT_IN_FILES, "nproc_per_node"}
        assert flag in known, flag
