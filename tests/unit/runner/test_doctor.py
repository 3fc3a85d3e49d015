"""--doctor: what it finds, what it says of a run that would not work, and what it must never say or do."""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from huggingface_hub import constants
from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

from layers.attention_backends import TORCH_BACKENDS, XFUSER_BACKENDS
from layers.neighborhood_attention.select import MAKERS
from runner import doctor, hub_access
from runner.__main__ import main
from runner_models.ltx2.decoder_attention import DISABLE_VARIABLE

ROOT = Path(__file__).parents[3]
SECRET = "hf_" + "thisIsNoToken"
LARGE = ["--model", "LTX-2.5", "--load_format", "dummy", "--height", "16384", "--width", "16384"]


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def ask(capsys: pytest.CaptureFixture[str], *flags: str, code: int = 0) -> dict[str, Any]:
    assert main(["--doctor", "--json", "--device", "cpu", *flags]) == code
    return json.loads(capsys.readouterr().out)


def test_without_flags_it_asks_about_the_demo(capsys: pytest.CaptureFixture[str]) -> None:
    report = ask(capsys)
    assert report["works"] is True
    assert report["problems"] == []
    run = report["run"]
    assert (run["model"], run["task"], run["height"], run["width"], run["num_frames"]) == ("tiny", "t2v", 512, 768, 25)
    assert (run["device"], run["dtype"], run["ranks"]) == ("cpu", "float32", 1)
    assert report["codecs"]["written"] == ["h264", "aac"]
    assert report["versions"]["torch"]
    assert report["versions"]["python"]
    memory = report["memory"]
    assert 0 < memory["needed_bytes"]["peak"] <= memory["available_bytes"]
    assert report["devices"][0]["name"] == "cpu"
    assert report["communication"]["library"] == "gloo"


def test_backends_are_those_of_the_flags(capsys: pytest.CaptureFixture[str]) -> None:
    report = ask(capsys)
    attention = {entry["name"]: entry for entry in report["attention_backends"]}
    assert tuple(attention) == TORCH_BACKENDS + XFUSER_BACKENDS
    assert (attention["SDPA"]["usable"], attention["SDPA"]["reason"]) == (True, None)
    assert attention["AITER"] == {
        "name": "AITER",
        "usable": False,
        "log_sum_exp": False,
        "reason": "it needs a GPU, and this is a CPU",
    }
    decoder = {entry["name"]: entry for entry in report["decoder_attention"]}
    assert tuple(decoder) == tuple(MAKERS)
    assert [name for name, entry in decoder.items() if entry["usable"]] == ["sdpa"]
    assert decoder["triton"]["reason"].startswith("needs NVIDIA sm80 or newer")


def test_a_named_backend_alone_is_tried(capsys: pytest.CaptureFixture[str]) -> None:
    report = ask(capsys, "--attention_backend", "sdpa_flash", "--ring_degree", "2")
    assert [(entry["name"], entry["log_sum_exp"]) for entry in report["attention_backends"]] == [("SDPA_FLASH", True)]
    report = ask(capsys, "--attention_backend", "SDPA_MATH", "--ring_degree", "2", code=1)
    assert "does not give the log-sum-exp" in report["problems"][0]
    assert len(report["attention_backends"]) == len(TORCH_BACKENDS + XFUSER_BACKENDS), "what could be had instead"


def test_text_says_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--doctor", "--device", "cpu"]) == 0
    text = capsys.readouterr().out
    assert "This run would work here: tiny, t2v, 768x512, 25 frames, on cpu in float32, 1 rank." in text
    assert "AITER_FLYDSL_FP8: it needs a GPU, and this is a CPU" in text
    assert "h264 + aac written and read back" in text
    assert main(["--doctor", "--device", "cpu", *LARGE]) == 1
    text = capsys.readouterr().out
    assert "This run would not work here: LTX-2.5, t2v, 16384x16384, 121 frames" in text
    assert "\n  - --height 16384 --width 16384 --num_frames 121 needs about" in text


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (["--num_frames", "120"], "--num_frames 120 is not 8*k+1; the nearest valid counts are 113 and 121."),
        (["--attention_backend", "AITER"], "--attention_backend AITER is not available here: it needs a GPU"),
        (["--decoder_attention", "aiter"], "--decoder_attention aiter cannot be used here: "),
        (["--ulysses_degree", "3"], "--ulysses_degree 3 does not divide the model's 8 attention heads"),
        (["--model", "tinny"], "--model tinny is neither a known model nor a folder. Did you mean tiny?"),
        (["--model", "LTX-2.5", "--dtype", "bf16"], "Lightricks/LTX-2.5-Diffusers is not in the cache and the hub's"),
        (["--input_images", "nothing.png"], "--input_images nothing.png cannot be read"),
        (["--output_directory", "/proc/nowhere/out"], "--output_directory /proc/nowhere/out cannot be written"),
        (LARGE, "--height 16384 --width 16384 --num_frames 121 needs about"),
    ],
    ids=lambda value: value[0][2:] if isinstance(value, list) else "",
)
def test_what_would_stop_the_run(
    flags: list[str], problem: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    report = ask(capsys, *flags, code=1)
    assert report["works"] is False
    assert any(found.startswith(problem) for found in report["problems"]), report["problems"]
    if "--model" not in flags or "tinny" not in flags:
        assert report["decoder_attention"], "the rest is answered all the same"


def test_ranks_need_no_torchrun(capsys: pytest.CaptureFixture[str]) -> None:
    report = ask(capsys, "--ulysses_degree", "2", "--ring_degree", "2", "--use_parallel_vae")
    assert report["run"]["ranks"] == 4
    assert report["works"]


def test_under_torchrun_the_first_rank_answers(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    report = ask(capsys, code=1)
    assert "= 1, but 2 processes were started" in report["problems"][0]
    monkeypatch.setenv("RANK", "1")
    assert main(["--doctor"]) == 0
    assert capsys.readouterr().out == ""


def test_a_full_disk(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=2**20))
    (problem,) = ask(capsys, code=1)["problems"]
    assert re.search(r" has 1 MiB free and the weights take \d\d MiB\.$", problem)


def test_a_bad_variable_is_a_problem(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(DISABLE_VARIABLE, "everything")
    report = ask(capsys, code=1)
    assert report["problems"] == [f"{DISABLE_VARIABLE}=everything may name natten, aiter, triton."]
    assert report["variables"][DISABLE_VARIABLE] == "everything"


def test_secrets_are_not_told(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", SECRET)
    monkeypatch.setenv("HTTPS_PROXY", f"http://me:{SECRET}@proxy:80")
    monkeypatch.setenv("HF_ENDPOINT", f"https://me:{SECRET}@mirror.example")
    report = ask(capsys)
    assert SECRET not in json.dumps(report)
    assert report["checkpoint"]["hub"]["token"] is True
    assert report["variables"]["HF_TOKEN"] == report["variables"]["HTTPS_PROXY"] == "(set)"
    assert report["variables"]["HF_ENDPOINT"] == "https://(hidden)@mirror.example"
    assert main(["--doctor", "--device", "cpu"]) == 0
    assert SECRET not in capsys.readouterr().out


def test_a_password_with_an_at_sign_is_not_told_either() -> None:
    found = doctor.variables({"HF_ENDPOINT": f"https://me:p@{SECRET}@mirror.example/x"})
    assert found["HF_ENDPOINT"] == "https://(hidden)@mirror.example/x"


def test_an_address_in_the_hubs_answer_has_no_password(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    error = OSError(f"Client error '401 Unauthorized' for url 'https://me:{SECRET}@mirror.example/x'")
    monkeypatch.setattr(hub_access, "get_hf_file_metadata", _fails(error))
    reason = hub_access.hub_access(revision=None).reason
    assert reason == "OSError: Client error '401 Unauthorized' for url 'https://(hidden)@mirror.example/x'"


@pytest.mark.parametrize("name", ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"])
@pytest.mark.parametrize("flag", ["--doctor", "--dry_run"])
def test_a_launchers_variable_that_is_no_number(
    name: str, flag: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "x")
    assert main([flag]) == 2
    assert capsys.readouterr().err.startswith(f"error: {name}=x in the environment is not a count; ")


def _fails(error: Exception) -> Any:
    def fail(url: str, timeout: float) -> None:
        raise error

    return fail


_RESPONSE: Any = SimpleNamespace(headers={}, status_code=403, request=None)


@pytest.mark.parametrize(
    ("error", "access", "reason"),
    [
        (GatedRepoError("gated", response=_RESPONSE), "refused", "it is gated and no token is set: see https://"),
        (RepositoryNotFoundError("404", response=_RESPONSE), "refused", "it does not exist, or is not visible"),
        (RevisionNotFoundError("404", response=_RESPONSE), "refused", "--revision r is no commit or branch of it"),
        (OSError("no route"), "unreachable", "OSError: no route"),
    ],
    ids=["gated", "missing", "revision", "network"],
)
def test_what_the_hub_says(
    error: Exception, access: str, reason: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "none"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr(hub_access, "get_hf_file_metadata", _fails(error))
    found = hub_access.hub_access(revision="r")
    assert (found.access, found.token) == (access, False)
    assert found.reason is not None
    assert found.reason.startswith(reason)


def test_a_hub_that_never_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub_access, "get_hf_file_metadata", lambda url, timeout: time.sleep(20))
    started = time.monotonic()
    found = hub_access.hub_access(revision=None, seconds=0.1)
    assert time.monotonic() - started < 5
    assert (found.access, found.reason) == ("unreachable", "no answer within 0.1 s")


def test_json_belongs_to_the_doctor(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--json", "--model", "tiny", "--task", "t2v", "--prompt", "x"]) == 2
    assert capsys.readouterr().err.startswith("error: --json belongs to --doctor")
    assert main(["--doctor", "--num_frame", "9"]) == 2


def test_a_module_that_cannot_be_imported() -> None:
    (problem,) = doctor.import_problems(("json", "no_such_module"))
    assert problem == (
        "no_such_module cannot be imported (ModuleNotFoundError: No module named 'no_such_module'); install it again."
    )


def test_a_broken_package_is_a_line_and_no_traceback(tmp_path: Path) -> None:
    (tmp_path / "yunchang.py").write_text("print('hello')\nraise ImportError('undefined symbol: _ZN3c10')\n")
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "runner", "--doctor", "--json"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert json.loads(done.stdout)["problems"] == [
        "yunchang cannot be imported (ImportError: undefined symbol: _ZN3c10); install it again."
    ]
    assert "hello" in done.stderr
    assert "Traceback" not in done.stderr
