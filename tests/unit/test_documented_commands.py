"""README's table of flags, and every command in a ```bash block: parsed, run, or marked as needing hardware.

docs/benchmarks.md has a test of its own that runs its commands (tests/integration/cpu/test_docs_benchmarks.py).
"""

import os
import re
import shlex
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path

import pytest
from dockerfile_parse import DockerfileParser

from runner import cli
from runner.checks import check
from runner.config import RunConfig
from runner.flags import GROUPS
from tests.unit.docs_tables import check_table

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").glob("*.md"))]
MARK = re.compile(r"#.*\bneeds (?:a|one|\d+) (?:GPUs?|container engine)\b")


@dataclass(frozen=True)
class Command:
    """One command of a page; `marked`: it needs what a test does not have."""

    page: str
    words: tuple[str, ...]
    marked: bool

    def __str__(self) -> str:
        return f"{self.page}: {' '.join(self.words)[:60]}"


def commands(pages: list[Path]) -> list[Command]:
    found = []
    for page in pages:
        for block in re.findall(r"^```bash\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE):
            for line in block.replace("\\\n", " ").splitlines():
                words = tuple(shlex.split(line, comments=True))
                if words:
                    found.append(Command(page.name, words, bool(MARK.search(line))))
    return found


def runner_flags(words: tuple[str, ...]) -> tuple[list[str], int] | None:
    """The runner's flags of a command, and its number of processes; None where it does not start the runner."""
    ranks = next((int(word.partition("=")[2]) for word in words if word.startswith("--nproc_per_node=")), 1)
    if words[:2] == ("docker", "run"):
        image = next(index for index, word in enumerate(words) if word.startswith("ltx-runner"))
        return [word for word in words[image + 1 :] if not word.startswith("--nproc_per_node")], ranks
    if "-m" in words and words[words.index("-m") + 1] == "runner":
        return list(words[words.index("-m") + 2 :]), ranks
    return None


ALL = commands(PAGES)
RUNNER = [command for command in ALL if runner_flags(command.words)]
OTHER = [command for command in ALL if command not in RUNNER and command.page != "benchmarks.md"]


def test_flags_of_the_readme() -> None:
    rows = ["| flag | |", "| --- | --- |"]
    for title, flags in GROUPS.items():
        rows.append(f"| **{title}** | |")
        rows += [f"| `--{flag.name}` | {flag.help.replace('|', chr(92) + '|')} |" for flag in flags]
    check_table(README, "flags", "\n".join(rows))


def test_the_readme_says_what_help_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "1000")
    text = " ".join(cli.build_parser().format_help().split())
    table = README.read_text().split("<!-- flags -->")[1].split("<!-- end -->")[0]
    rows = re.findall(r"^\| `(--\w+)` \| (.+?) \|$", table, re.MULTILINE)
    assert len(rows) > 25
    for flag, words in rows:
        assert re.search(rf"{flag}( \S+)*? {re.escape(words.replace(chr(92), ''))}", text), flag
    for flag in ("--config", "--from_json", "--doctor", "--json"):
        assert f"`{flag}" in README.read_text()
        assert flag in text


def test_there_are_commands() -> None:
    assert len(RUNNER) >= 8
    assert len([command for command in ALL if command.page == "README.md"]) >= 9


@pytest.mark.parametrize("command", RUNNER, ids=str)
def test_the_runner_takes_it(command: Command) -> None:
    flags, ranks = runner_flags(command.words) or ([], 1)
    asked = cli.read(flags)
    values = {"task": "t2v", "prompt": ("a cat",), **asked.values} if asked.doctor else asked.values
    config = RunConfig.from_values(values)
    if asked.doctor:
        ranks = config.sequence_degree * config.data_parallel_degree
    check(config, world_size=ranks, local_world_size=ranks, gpu_count=ranks, num_heads=32)
    assert command.marked or config.model == "tiny", "mark it: # needs a GPU"
    if ranks > 1:
        assert command.marked


@pytest.mark.parametrize("command", [c for c in RUNNER if not c.marked and c.page != "benchmarks.md"], ids=str)
def test_a_tiny_command_runs(command: Command, tmp_path: Path) -> None:
    """As it stands, but for where it writes."""
    python = [sys.executable if word == "python" else word for word in command.words]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(python, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("command", OTHER, ids=str)
def test_other_commands(command: Command) -> None:
    words = list(command.words)
    gate = (ROOT / ".ci" / "run").read_text()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    if words[0] == "bash":
        assert " ".join(words) in gate, "the gate runs it"
    elif words[:3] == ["pip", "install", "-e"]:
        extras = re.findall(r"\[(.*)\]", words[3])
        assert set(",".join(extras).split(",")) - {""} <= set(project["optional-dependencies"])
    elif words[0] == "export":
        assert re.fullmatch(r"[A-Z_]+=\S+", words[1])
    elif words[:2] == ["docker", "build"]:
        assert command.marked
        given = {word.partition("=")[0] for word in words if re.match(r"[A-Z_]+=", word)}
        assert given <= _build_arguments()
    else:
        script = next(word for word in words if word.startswith("scripts/"))
        source = (ROOT / script).read_text()
        assert command.marked, "mark it: # needs a GPU"
        also = {f"--{flag.name}" for flags in GROUPS.values() for flag in flags} if "bench_e2e" in script else set()
        for flag in (word for word in words[words.index(script) :] if word.startswith("--")):
            assert flag in also or f'"{flag}"' in source, flag


def _build_arguments() -> set[str]:
    parser = DockerfileParser(fileobj=(ROOT / "Dockerfile").open("rb"))
    return {step["value"].partition("=")[0] for step in parser.structure if step["instruction"] == "ARG"}


def test_a_wrong_command_is_noticed(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("```bash\npython -m runner --model tiny --task t2v --prompt x \\\n    --num_frames 120\n```\n")
    (command,) = commands([page])
    assert (command.words[-1], command.marked) == ("120", False)
    with pytest.raises(ValueError, match=r"8\*k\+1"):
        test_the_runner_takes_it(command)
    page.write_text("```bash\npython -m runner --model LTX-2.5 --task t2v --prompt x\n```\n")
    with pytest.raises(AssertionError, match="mark it"):
        test_the_runner_takes_it(commands([page])[0])
