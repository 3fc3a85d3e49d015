"""Markers that need hardware are skipped where it is absent, with the reason in the report."""

import os
from pathlib import Path

import pytest
import torch

from runner_models.ltx2.tiny import tiny_checkpoint


def _missing(item: pytest.Item) -> str | None:
    names = {mark.name for mark in item.iter_markers()}
    if not names & {"accelerator", "nvidia", "rocm", "multi_gpu", "weights"}:
        return None
    if "weights" in names and not os.environ.get("LTX_WEIGHTS"):
        return "needs the released checkpoint: LTX_WEIGHTS=FOLDER"
    if not torch.cuda.is_available():
        return "needs a GPU"
    if "rocm" in names and torch.version.hip is None:
        return "needs an AMD GPU with ROCm"
    if "nvidia" in names and torch.version.hip is not None:
        return "needs an NVIDIA GPU"
    if "multi_gpu" in names and torch.cuda.device_count() < 2:
        return f"needs two or more GPUs, found {torch.cuda.device_count()}"
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        reason = _missing(item)
        if reason:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """Two OpenMP threads beside another busy process made a 0.1 s stage take 7.5 s."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_folder() -> Path:
    """The folder of the tiny checkpoint, from the user's cache or made now."""
    return tiny_checkpoint()
