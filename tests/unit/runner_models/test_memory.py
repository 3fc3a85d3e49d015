"""The memory estimate against what was measured."""

from pathlib import Path

import pytest

from runner_models import find_recipe
from runner_models.ltx2.memory import estimate
from runner_models.ltx2.recipes import DISTILLED

GIB = 2**30


def _peak(model: str, **changes: object) -> float:
    request = {"height": 1024, "width": 1536, "num_frames": 121, "dtype": "bfloat16", "load_format": "dummy"}
    return estimate(find_recipe(model), model=model, **(request | changes))["peak"] / GIB


# Peaks of the allocator on an H200, torch 2.11: benchmarks/request_h200_*.json, GiB.
@pytest.mark.parametrize(
    ("model", "changes", "measured"),
    [
        pytest.param("LTX-2.5", {}, 130.9, id="distilled"),
        pytest.param("LTX-2.5-full", {"offload": True}, 64.6, id="full-offloaded"),
    ],
)
def test_agrees_with_the_card(model: str, changes: dict, measured: float) -> None:
    assert _peak(model, **changes) == pytest.approx(measured, rel=0.05)


def test_what_changes_it() -> None:
    whole = _peak("LTX-2.5")
    assert _peak("LTX-2.5", num_frames=49) < whole
    assert _peak("LTX-2.5", dtype="float32") == pytest.approx(2 * whole, rel=1e-6)
    weights_and_decode = estimate(
        DISTILLED, height=1024, width=1536, num_frames=121, dtype="bfloat16", load_format="dummy", model="LTX-2.5"
    )
    shared = estimate(
        DISTILLED,
        height=1024,
        width=1536,
        num_frames=121,
        dtype="bfloat16",
        load_format="dummy",
        model="LTX-2.5",
        sequence_degree=8,
    )
    assert shared["denoise"] == pytest.approx(weights_and_decode["denoise"] / 8, rel=1e-6)
    assert shared["decode"] == weights_and_decode["decode"], "one rank decodes alone"


def test_a_folder_is_counted_and_tiny_needs_no_folder(tiny_folder: Path) -> None:
    request = {"height": 256, "width": 256, "num_frames": 17, "dtype": "float32", "load_format": "auto"}
    by_name = estimate(DISTILLED, model="tiny", **request)
    assert by_name == estimate(DISTILLED, model=str(tiny_folder), **request)
    assert by_name["peak"] < GIB
