"""--doctor on a GPU: what it finds must be what a run there uses."""

import json
from typing import Any

import pytest
import torch
from huggingface_hub import constants

from runner.__main__ import main

pytestmark = pytest.mark.accelerator


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


def _ask(capsys: pytest.CaptureFixture[str], *flags: str) -> tuple[int, dict[str, Any]]:
    code = main(["--doctor", "--json", *flags])
    return code, json.loads(capsys.readouterr().out)


def test_a_small_run(capsys: pytest.CaptureFixture[str]) -> None:
    size = ["--height", "256", "--width", "256", "--num_frames", "17"]
    code, report = _ask(capsys, "--model", "tiny", *size, "--attention_backend", "SDPA")
    assert (code, report["problems"]) == (0, [])
    assert (report["run"]["device"], report["run"]["dtype"]) == ("cuda", "bfloat16")
    assert len(report["devices"]) == 1 + torch.cuda.device_count()
    gpu = report["devices"][1]
    assert gpu["name"] == torch.cuda.get_device_name(0)
    assert 0 < gpu["free_memory_bytes"] <= gpu["memory_bytes"]
    library = report["communication"]
    assert library["library"] == ("RCCL" if torch.version.hip else "NCCL")
    assert library["version"]
    decoder = {entry["name"]: entry for entry in report["decoder_attention"]}
    assert decoder["sdpa"]["usable"]
    assert all(entry["usable"] or entry["reason"] for entry in decoder.values())


def test_the_default_question_is_the_released_model(capsys: pytest.CaptureFixture[str]) -> None:
    """Whether its memory suffices follows from the device; its random weights need neither hub nor disk."""
    code, report = _ask(capsys, "--load_format", "dummy", "--attention_backend", "SDPA")
    run, memory = report["run"], report["memory"]
    assert (run["model"], run["height"], run["width"], run["num_frames"]) == ("LTX-2.5", 1024, 1536, 121)
    fits = memory["needed_bytes"]["peak"] <= memory["available_bytes"]
    assert code == (0 if fits else 1)
    assert report["works"] is fits
