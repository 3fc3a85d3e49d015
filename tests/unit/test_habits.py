"""The rules of the tree that a reader would otherwise have to check by eye."""

import ast
import tomllib
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
ALLOWED = {
    "layers": {"layers"},
    "runner_models": {"layers", "runner_models"},
    "runner": {"layers", "runner_models", "runner"},
}
PROJECT = set(ALLOWED) | {"scripts", "tests"}


def _imports(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            module = node.module or ""
            names |= {module, *(f"{module}.{alias.name}" for alias in node.names)}
    return names


def _files(package: str) -> list[Path]:
    files = sorted((ROOT / package).rglob("*.py"))
    assert files
    return files


@pytest.mark.parametrize("package", ALLOWED)
def test_imports_go_one_way(package: str) -> None:
    for path in _files(package):
        roots = {name.split(".")[0] for name in _imports(path)}
        assert not (roots & PROJECT) - ALLOWED[package], path


@pytest.mark.parametrize("package", ALLOWED)
def test_no_modules_import_each_other_in_a_circle(package: str) -> None:
    """Imports inside functions count."""
    modules = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in _files(package)}
    TopologicalSorter({name: _imports(path) & set(modules) for name, path in modules.items()}).prepare()


def test_layers_know_nothing_of_diffusers() -> None:
    for path in _files("layers"):
        assert not {name.split(".")[0] for name in _imports(path)} & {"diffusers", "transformers"}, path


OPTIONAL = {"xfuser": 1, "natten": 1, "aiter": 1, "kernels": 1}


@pytest.mark.parametrize("package", OPTIONAL)
def test_optional_packages_are_imported_in_one_module(package: str) -> None:
    users = [
        path
        for owner in ALLOWED
        for path in _files(owner)
        if any(name.split(".")[0] == package for name in _imports(path))
    ]
    assert len(users) <= OPTIONAL[package], users


def test_hooks_and_dev_extra_have_the_same_pins() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    pins = dict(pin.split("==") for pin in project["project"]["optional-dependencies"]["dev"] if "==" in pin)
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    revisions = {repo["hooks"][0]["id"].split("-")[0]: repo["rev"].removeprefix("v") for repo in hooks}
    assert revisions == {"ruff": pins["ruff"], "mypy": pins["mypy"]}


@pytest.mark.parametrize("package", ALLOWED)
def test_packages_are_typed(package: str) -> None:
    assert (ROOT / package / "py.typed").is_file()
    assert (ROOT / package / "__init__.py").is_file()
