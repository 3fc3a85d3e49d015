"""The memory estimate against what was measured."""

from pathlib import Path

import pytest

from runner_models import find_recipe
from runner_models.ltx2.decoder.options import DecodeOptions
from runner_models.ltx2.memory import estimate
from runner_models.ltx2.recipes import DISTILLED

GIB = 2**30


def _peak(model: str, **changes: object) -> float:
    request = {"height": 1024, "width": 1536, "num_frames": 121, "dtype": "bfloat16", "load_format": "dummy"}
    return estimate(find_recipe(model), model=model, **(request | changes))["peak"] / GIB


# Peaks of the allocator on an H200, torch 2.11, GiB: weights and the stock untiled decode, 1536x1024x121. Benchmarks of
# whole requests from before the exact decode: benchmarks/earlier/.
WEIGHTS, STOCK_DECODE = 66.3, 64.6


def test_agrees_with_the_card() -> None:
    request = {"height": 1024, "width": 1536, "num_frames": 121, "dtype": "bfloat16", "load_format": "dummy"}
    found = estimate(DISTILLED, model="LTX-2.5", **request)
    assert found["weights"] / GIB == pytest.approx(WEIGHTS, rel=0.01)
    assert found["decode_in_chunks"] < found["decode"] < STOCK_DECODE * GIB
    assert found["peak"] == found["weights"] + found["decode_in_chunks"], "it goes over to chunks by itself"
    conv = estimate(DISTILLED, model="LTX-2.5", **request, decode=DecodeOptions("conv"))
    assert conv["decode"] / GIB == pytest.approx(STOCK_DECODE, rel=0.01)
    tiled = estimate(DISTILLED, model="LTX-2.5", **request, decode=DecodeOptions("tiled"))
    assert tiled["decode"] / GIB == pytest.approx(19.3 - 0.8, rel=0.1)


def test_what_changes_it() -> None:
    whole = _peak("LTX-2.5")
    assert _peak("LTX-2.5", decode=DecodeOptions(streaming=True, chunk_frames=32)) > whole
    assert _peak("LTX-2.5", num_frames=17) < whole
    assert _peak("LTX-2.5", num_frames=241) == pytest.approx(whole, rel=0.01), "not the length"
    assert _peak("LTX-2.5", dtype="float32") == pytest.approx(2 * whole, rel=1e-6)
    request = {"height": 1024, "width": 1536, "num_frames": 121, "dtype": "bfloat16", "load_format": "dummy"}
    alone = estimate(DISTILLED, model="LTX-2.5", **request)
    shared = estimate(DISTILLED, model="LTX-2.5", **request, sequence_degree=8)
    assert shared["denoise"] == pytest.approx(alone["denoise"] / 8, rel=1e-6)
    assert shared["decode"] == alone["decode"], "one rank decodes alone"
    spread = estimate(DISTILLED, model="LTX-2.5", **request, sequence_degree=8, decode=DecodeOptions(parallel=True))
    assert alone["decode"] / 8 < spread["decode"] < alone["decode"] / 5


def test_a_folder_is_counted_and_tiny_needs_no_folder(tiny_folder: Path) -> None:
    request = {"height": 256, "width": 256, "num_frames": 17, "dtype": "float32", "load_format": "auto"}
    by_name = estimate(DISTILLED, model="tiny", **request)
    assert by_name == estimate(DISTILLED, model=str(tiny_folder), **request)
    assert by_name["peak"] < GIB
