"""The sequence-parallel transformer against the stock forward of one process, on gloo ranks.

Processes start once per world size; everything they found is asserted here, case by case.
"""

from functools import cache
from typing import Any

import pytest
import torch
from ranks import run_ranks
from transformer_cases import CASES, FAULTS, check_cases, deviation, forward, inputs_of, make_transformer

from layers.attention_backends import select_backend
from layers.parallel_state import ParallelState
from runner_models.ltx2.transformer import VideoSelfAttention, parallelize

# Largest difference over the standard deviation of the stock output, fp32. Measured: 3.4e-6 at most, from the order of
# sums in softmax parts and in matmuls of other shapes.
TOLERANCE = 1e-5
# The weakest fault moves the weaker of its outputs by 0.067; what is asserted is 1,000 times the tolerance.
VISIBLE = 1e-2

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


def _backend(name: str) -> Any:
    return select_backend(name, device=torch.device("cpu"), dtype=torch.float32, head_dim=16)


def test_one_process_with_the_default_is_left_alone() -> None:
    model = make_transformer("split")
    before = [block.attn1.processor for block in model.transformer_blocks]
    handle = parallelize(model, ParallelState(), backend=_backend("SDPA"))
    assert [block.attn1.processor for block in model.transformer_blocks] == before
    assert not model._forward_hooks
    assert not model._forward_pre_hooks
    handle.remove()


@pytest.mark.parametrize("case", CASES[:2] + CASES[9:11], ids=lambda case: case.name)
@pytest.mark.parametrize("name", ["SDPA_FLASH", "SDPA_MATH"])
def test_named_backend_in_one_process(name: str, case: Any) -> None:
    model = make_transformer(case.rope_type)
    wanted = forward(model, case)
    handle = parallelize(model, ParallelState(), backend=_backend(name))
    assert all(isinstance(block.attn1.processor, VideoSelfAttention) for block in model.transformer_blocks)
    got = forward(model, case)
    handle.remove()
    assert deviation(got[0], wanted[0]) <= TOLERANCE
    assert deviation(got[1], wanted[1]) <= TOLERANCE


def test_what_cannot_work_is_refused() -> None:
    model = make_transformer("split")
    with pytest.raises(ValueError, match="--ulysses_degree 3 does not divide 8"):
        parallelize(model, ParallelState(ulysses_degree=3))
    with pytest.raises(ValueError, match="SDPA_MATH gives no log-sum-exp"):
        parallelize(model, ParallelState(ring_degree=2), backend=_backend("SDPA_MATH"))
    handle = parallelize(model, ParallelState(ulysses_degree=2))
    inputs = inputs_of(CASES[0], model) | {"video_self_attention_mask": torch.ones(1, 60, 60)}
    with pytest.raises(ValueError, match="video_self_attention_mask"):
        model(**inputs)
    handle.remove()
