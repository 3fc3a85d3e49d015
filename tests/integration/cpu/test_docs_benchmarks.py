"""The commands of docs/benchmarks.md, as they stand there, in a folder that looks like a checkout."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


def _commands() -> list[str]:
    """Lines of the bash blocks, without comments of their own."""
    blocks = re.findall(r"```bash\n(.*?)```", (ROOT / "docs" / "benchmarks.md").read_text(), re.DOTALL)
    return [line for block in blocks for line in block.splitlines() if line and not line.startswith("#")]


def test_scripts_and_links_exist() -> None:
    text = (ROOT / "docs" / "benchmarks.md").read_text()
    for link in re.findall(r"\]\(([^)#]+)\)", text):
        assert (ROOT / "docs" / link).exists(), link
    for script in {word for line in _commands() for word in re.findall(r"scripts/\w+\.(?:py|sh)", line)}:
        assert (ROOT / script).is_file(), script


@pytest.mark.slow
def test_commands_run(tmp_path: Path) -> None:
    """All but those that need hardware; pip alone is left out, the tests run with what it installs."""
    (tmp_path / "scripts").symlink_to(ROOT / "scripts")
    shutil.copytree(ROOT / "benchmarks", tmp_path / "benchmarks")
    variables = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    last = {}
    for line in _commands():
        if "  # needs " in line or line.startswith("pip install"):
            continue
        done = subprocess.run(
            ["bash", "-c", line], cwd=tmp_path, env=os.environ | variables | {"OMP_NUM_THREADS": "1"},
            capture_output=True, text=True, timeout=300,
        )  # fmt: skip
        assert done.returncode == 0, (line, done.stderr)
        last[line] = done.stdout
    assert len(last) == 5, "the report, two requests and two comparisons"
    assert (tmp_path / "benchmarks" / "report.html").stat().st_size > 10_000
    for line, out in last.items():
        if "compare_videos" in line:
            assert json.loads(out.splitlines()[-1])["passed"], line
    reference = next(out for line, out in last.items() if "--against_reference" in line)
    assert json.loads(reference.splitlines()[-1])["equal_frames"] == 17
