"""The sequence-parallel transformer against the stock forward of one process, on gloo ranks.

Processes start once per world size; everything they found is asserted here, case by case.
"""

from functools import cache
from typing import Any

import pytest
from ranks import run_ranks
from transformer_cases import CASES, FAULTS, check_cases

# Largest difference over the standard deviation of the stock output, fp32. Measured: 3.4e-6 at most, from the order of
# sums in softmax parts and in matmuls of other shapes.
TOLERANCE = 1e-5
# The weakest fault here moves the weaker of its outputs by 1.5e-2; what is asserted keeps 100 times the tolerance.
VISIBLE = 1e-3

DEGREES = {2: [(2, 1), (1, 2)], 3: [(1, 3)], 4: [(2, 2), (4, 1), (1, 4)]}
MESHES = [pytest.param(world, f"u{u}r{r}", id=f"u{u}r{r}") for world, pairs in DEGREES.items() for u, r in pairs]


@cache
def report(world: int) -> dict[str, Any]:
    found: dict[str, Any] = run_ranks(check_cases, world, DEGREES[world])
    return found


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize(("world", "mesh"), MESHES)
def test_equals_stock_forward(world: int, mesh: str, case: Any) -> None:
    found = report(world)[f"{mesh} {case.name}"]
    assert found["video"] <= TOLERANCE
    assert found["audio"] <= TOLERANCE
    assert found["same_on_all_ranks"], "ranks disagree about the bits of the output"
    assert found["padding_changes_nothing"], "padding was attended"
    assert found["stock_again"], "remove() left something behind"


@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.parametrize(("world", "mesh"), MESHES)
def test_fault_is_visible(world: int, mesh: str, name: str) -> None:
    moved = dict(zip(("video", "audio"), report(world)[f"{mesh} faults"][name], strict=True))
    for output in FAULTS[name]:
        assert VISIBLE < moved[output] < float("inf")


@pytest.mark.parametrize(("world", "mesh"), MESHES)
def test_bytes_counted_equal_bytes_computed(world: int, mesh: str) -> None:
    counted, computed = (report(world)[f"{mesh} bytes"][name] for name in ("counted", "computed"))
    assert counted["all_to_all"] == computed.ulysses + computed.ring
    assert counted["all_gather"] == computed.audio_merge + computed.output_gather
    assert computed.total > 0
