"""The gloo cases of the sequence-parallel transformer on two GPUs, NCCL or RCCL, fp32."""

from functools import cache
from typing import Any

import pytest
from ranks import run_ranks
from transformer_cases import CASES, FAULTS, check_cases

# fp32 without TF32; GPU matmuls of other shapes sum in another order. Ten times what the CPU needs.
TOLERANCE = 1e-4
DEGREES = [(2, 1), (1, 2)]
MESHES = [f"u{u}r{r}" for u, r in DEGREES]


@cache
def report() -> dict[str, Any]:
    found: dict[str, Any] = run_ranks(check_cases, 2, DEGREES, "cuda")
    return found


@pytest.mark.accelerator
@pytest.mark.multi_gpu
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("mesh", MESHES)
def test_equals_stock_forward(mesh: str, case: Any) -> None:
    found = report()[f"{mesh} {case.name}"]
    assert found["video"] <= TOLERANCE
    assert found["audio"] <= TOLERANCE
    assert found["same_on_all_ranks"], "ranks disagree about the bits of the output"
    assert found["padding_changes_nothing"], "padding was attended"


@pytest.mark.accelerator
@pytest.mark.multi_gpu
@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.parametrize("mesh", MESHES)
def test_fault_is_visible(mesh: str, name: str) -> None:
    moved = dict(zip(("video", "audio"), report()[f"{mesh} faults"][name], strict=True))
    for output in FAULTS[name]:
        assert 1e-2 < moved[output] < float("inf")
