"""The pages against the tree: every file they name exists, every module is on the map, every link leads somewhere."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
MAP = (ROOT / "docs" / "architecture.md").read_text()
FOLDERS = ("layers/neighborhood_attention/", "layers/fused/", "runner_models/ltx2/decoder/")
"""Packages that the map names as a whole; the pages on them name their files."""


def test_every_module_is_on_the_map() -> None:
    modules = [
        path.relative_to(ROOT).as_posix()
        for package in ("layers", "runner_models", "runner")
        for path in (ROOT / package).rglob("*.py")
        if path.name != "__init__.py"
    ]
    missing = [name for name in modules if f"`{name}`" not in MAP and not name.startswith(FOLDERS)]
    assert not missing


def _named(text: str) -> set[str]:
    """Paths from the top of the repository that stand in code quotes, without placeholders."""
    tops = r"(?:layers|runner_models|runner|scripts|tests|docs|benchmarks|docker)"
    return set(re.findall(rf"`({tops}/[\w./-]*)`", text))


@pytest.mark.parametrize("page", [*PAGES, ROOT / "NOTICE"], ids=lambda page: page.name)
def test_named_files_exist(page: Path) -> None:
    text = page.read_text()
    if page.name == "NOTICE":
        text = re.sub(r"(layers|runner_models)/[\w./]*\w/?", r"`\g<0>`", text)
        assert len(_named(text)) > 6
    missing = {name for name in _named(text) if not (ROOT / name).exists()}
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?://)([^)#]+)", page.read_text()):
        assert (page.parent / target).exists(), target


def test_files_of_the_exact_decode_and_of_the_operator_exist() -> None:
    for row, folder in (("How are latents decoded?", FOLDERS[2]), ("3-D neighborhood attention |", FOLDERS[0])):
        (line,) = [line for line in MAP.splitlines() if row in line]
        names = re.findall(r"`(\w+\.py)`", line)
        assert names
        for name in names:
            assert (ROOT / folder / name).exists(), name
