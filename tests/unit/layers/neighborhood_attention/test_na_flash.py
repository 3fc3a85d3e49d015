"""The Triton kernels in Triton's interpreter against the fp32 reference.

Its bf16 dot is wrong, so fp32 stands in for bf16 (same exponents, same code path); fp16 takes the running maximum.
"""

import dataclasses
import subprocess
import sys

import na_calls
import pytest
import torch

from layers.neighborhood_attention import MAX_SOFTMAX_BOUND, configs, hopper, neighborhood_attention_reference
from layers.neighborhood_attention.configs import RowConfig, TileConfig
from layers.neighborhood_attention.geometry import check_inputs
from layers.neighborhood_attention.hopper import plan_walks

TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3}  # relative L2; fp16 rounds probabilities and the output
F16, F32 = torch.float16, torch.float32
SM90, GFX = configs.load("sm90"), configs.load("gfx942")
# A little tile: 16 queries and 16 keys, so that tiny grids have inner tiles, a packed rest and a padded one.
LITTLE = TileConfig((2, 2, 4), 16, 1, 1, partial_sums=True, q_in_registers=True)
slow = pytest.mark.slow


def fused_qkv(shape, dtype):
    """q, k, v as strided views of one projection; scores of a few units."""
    generator = torch.Generator().manual_seed(0)
    qkv = torch.randn(*shape[:4], 3, *shape[4:], generator=generator)
    qkv[:, :, :, :, 0] *= 3 * shape[5] ** -0.5
    return qkv.to(dtype).unbind(4)


def check(interpreted, q, k, v, kernel, *, tolerance=None, **arguments):
    offsets = {name: value for name, value in arguments.items() if name in ("q_start", "kv_start", "grid")}
    expected = neighborhood_attention_reference(q.float(), k.float(), v.float(), kernel, **offsets)
    actual = interpreted(na_calls.flash, q, k, v, kernel, **arguments)
    assert actual.dtype == q.dtype
    assert actual.shape == q.shape
    error = ((actual.float() - expected).norm() / expected.norm()).item()
    assert error < (tolerance or TOLERANCE[q.dtype])  # false for NaN


CASES = [
    ((1, 4, 5, 7, 2, 16), (3, 3, 5), "tile", F32),
    ((1, 4, 5, 7, 2, 16), (3, 3, 5), "row", F32),
    ((1, 4, 5, 7, 2, 16), (3, 3, 5), "tile", F16),
    ((1, 4, 5, 7, 2, 16), (3, 3, 5), "row", F16),
    ((2, 5, 9, 10, 1, 16), (3, 5, 5), "tile", F32),
    ((2, 3, 6, 18, 1, 16), (3, 5, 5), "row", F32),
    ((1, 6, 10, 11, 1, 16), (3, 5, 5), "tile", F16),
    ((1, 3, 7, 7, 1, 16), (3, 7, 7), "tile", F32),
    ((1, 3, 7, 7, 1, 16), (3, 7, 7), "row", F16),
    ((1, 5, 9, 12, 1, 16), (3, 7, 7), "tile", F32),
    ((1, 4, 8, 9, 3, 16), (3, 7, 7), "row", F32),
    ((1, 3, 7, 7, 32, 16), (3, 7, 7), "tile", F16),
    ((1, 3, 5, 40, 1, 16), (3, 5, 27), "tile", F32),
    ((1, 3, 5, 40, 1, 16), (3, 5, 27), "row", F32),
    ((1, 3, 5, 27, 1, 16), (3, 5, 27), "row", F16),
    ((1, 3, 5, 40, 1, 16), (1, 1, 35), "tile", F32),
    ((1, 4, 6, 7, 1, 64), (3, 5, 5), "tile", F32),
    ((1, 3, 5, 8, 1, 64), (3, 5, 5), "row", F16),
    ((1, 3, 6, 7, 1, 128), (3, 5, 5), "tile", F16),
    ((1, 3, 5, 6, 1, 128), (3, 5, 5), "row", F32),
    ((1, 3, 5, 6, 1, 256), (3, 5, 5), "tile", F32),
    ((1, 1, 1, 21, 1, 16), (1, 1, 21), "row", F32),
    ((1, 1, 1, 5, 1, 16), (1, 1, 1), "tile", F32),
    ((1, 11, 11, 11, 1, 16), (11, 11, 11), "tile", F32),
    pytest.param((1, 11, 11, 11, 1, 16), (11, 11, 11), "row", F32, marks=slow),
    pytest.param((1, 12, 14, 19, 2, 16), (11, 11, 11), "tile", F16, marks=slow),
    pytest.param((2, 13, 12, 17, 1, 64), (11, 11, 11), "tile", F32, marks=slow),
    pytest.param((1, 9, 17, 25, 3, 64), (3, 7, 7), "tile", F32, marks=slow),
    pytest.param((1, 5, 9, 33, 3, 64), (3, 7, 7), "row", F32, marks=slow),
    pytest.param((1, 7, 13, 21, 32, 64), (3, 5, 5), "tile", F16, marks=slow),
]


@pytest.mark.parametrize(("shape", "kernel", "schedule", "dtype"), CASES, ids=str)
def test_matches_reference(interpreted, shape, kernel, schedule, dtype):
    """On the views of a fused projection, with sm90's configs."""
    config = getattr(SM90, schedule)(kernel, shape[5])
    check(interpreted, *fused_qkv(shape, dtype), kernel, config=config)


@pytest.mark.parametrize("kernel", [(3, 3, 5), (1, 5, 3), (5, 3, 7)], ids=str)
@pytest.mark.parametrize("config", [LITTLE, GFX.tile((3, 5, 5), 64)], ids=["16-queries", "gfx942"])
def test_other_blocks(interpreted, config, kernel):
    check(interpreted, *fused_qkv((1, 7, 6, 9, 1, 16), F32), kernel, config=config)


def test_the_default_choice_is_a_config_of_the_json(interpreted):
    check(interpreted, *fused_qkv((1, 4, 6, 8, 1, 16), F32), (3, 5, 5))


@pytest.mark.parametrize("bound", [30.0, MAX_SOFTMAX_BOUND])
@pytest.mark.parametrize("config", [LITTLE, SM90.row((3, 5, 5), 64)], ids=["tile", "row"])
def test_softmax_bound(interpreted, config, bound):
    q, k, v = fused_qkv((1, 5, 6, 7, 1, 16), F32)
    check(interpreted, q, k, v, (3, 5, 5), config=config, softmax_bound=bound)


@pytest.mark.parametrize("gain", [25.0, -25.0], ids=["above", "below"])
def test_rows_beyond_the_constant_reference_are_computed_again(interpreted, gain):
    """Scores of some tiles reach +-300 in log2 units: their sums leave fp32. The others keep the fast result."""
    q, k, v = fused_qkv((1, 6, 6, 9, 2, 16), F32)
    k = k.abs()
    q = q.clone()
    q[:, :3] = q[:, :3].abs() * gain
    # Scores of some hundreds: their own fp32 rounding is 1e-5 of a weight.
    check(interpreted, q, k, v, (3, 3, 5), config=LITTLE, tolerance=1e-5)


@pytest.mark.parametrize("axis", [1, 2, 3], ids=["T", "H", "W"])
@pytest.mark.parametrize("config", [LITTLE, SM90.row((3, 5, 5), 64)], ids=["tile", "row"])
def test_sub_slices_with_offsets(interpreted, config, axis):
    """Three queries at the start, in the middle and at the end of an axis, with just the keys they need; then all."""
    grid, kernel = (5, 5, 7), (3, 3, 5)
    q, k, v = fused_qkv((1, *grid, 1, 16), F32)
    length, size = grid[axis - 1], kernel[axis - 1]
    for first in (0, 1, length - 3):
        begin = min(max(first - size // 2, 0), length - size)
        end = min(max(first + 2 - size // 2, 0), length - size) + size
        q_start, kv_start = [0, 0, 0], [0, 0, 0]
        q_start[axis - 1], kv_start[axis - 1] = first, begin
        part = q.narrow(axis, first, 3)
        keys = [x.narrow(axis, begin, end - begin) for x in (k, v)]
        check(interpreted, part, *keys, kernel, config=config, q_start=q_start, kv_start=kv_start, grid=grid)
    check(interpreted, part, k, v, kernel, config=config, q_start=q_start)


@pytest.mark.parametrize("config", [LITTLE, SM90.row((3, 3, 5), 64)], ids=["tile", "row"])
def test_layouts(interpreted, config):
    """Contiguous q and k with v of other strides, and heads in front of the grid."""
    q, k, v = fused_qkv((1, 4, 5, 7, 2, 16), F32)
    check(interpreted, q.contiguous(), k.contiguous(), v, (3, 3, 5), config=config)
    moved = [x.permute(0, 4, 1, 2, 3, 5).contiguous().permute(0, 2, 3, 4, 1, 5) for x in (q, k, v)]
    check(interpreted, *moved, (3, 3, 5), config=config)


def test_offsets_of_64_bits(interpreted):
    """Keys whose rows are 2**29 elements apart: a window spans more than 2**31 (of virtual memory only)."""
    q, k, v = fused_qkv((1, 3, 6, 6, 1, 16), F16)
    expected = neighborhood_attention_reference(q.float(), k.float(), v.float(), (3, 5, 5))
    actual = interpreted(na_calls.flash_with_far_rows, q, k, v, (3, 5, 5), row_stride=2**29, config=LITTLE)
    assert ((actual.float() - expected).norm() / expected.norm()).item() < TOLERANCE[F16]


BAD = {
    "dtype": ({"dtype": torch.float64}, "takes torch.float16 or torch.float32; got torch.float64"),
    "even kernel": ({"kernel": (3, 4, 5)}, "kernel_size 4 on axis H must be odd"),
    "kernel longer than its axis": ({"kernel": (3, 11, 5)}, "longer than the grid there"),
    "head_dim 48": ({"shape": (1, 3, 6, 7, 1, 48)}, "head_dim 48 must be a power of two from 16 to 256"),
    "head_dim 8": ({"shape": (1, 3, 6, 7, 1, 8)}, "head_dim 8 must be a power of two from 16 to 256"),
    "bound": ({"softmax_bound": 71.0}, r"softmax_bound 71.0 must lie in \[0, 70.70\]"),
    "row too wide": (
        {"shape": (1, 3, 6, 37, 1, 16), "kernel": (3, 5, 35), "config": SM90.row((3, 5, 33), 64)},
        "takes kernels up to 33 wide; got 35",
    ),
}


@pytest.mark.parametrize(("change", "message"), BAD.values(), ids=BAD)
def test_bad_input_says_what_is_allowed(interpreted, change, message):
    change = dict(change)
    shape = change.pop("shape", (1, 3, 6, 7, 1, 16))
    q, k, v = fused_qkv(shape, change.pop("dtype", F32))
    with pytest.raises(ValueError, match=message):
        interpreted(na_calls.flash, q, k, v, change.pop("kernel", (3, 5, 5)), **change)


def test_mismatched_and_strided_tensors_are_refused(interpreted):
    q, k, v = fused_qkv((1, 3, 6, 7, 2, 16), F32)
    for bad, message in (
        ((q, k, v[:, :2]), "k and v must have one shape"),
        ((q[..., :1, :], k, v), "must agree in all but T, H, W"),
        ((q.half(), k, v), "one floating-point dtype"),
        ((q, k.transpose(4, 5).contiguous().transpose(4, 5), v), "the last stride of k must be 1; got 2"),
    ):
        with pytest.raises(ValueError, match=message):
            interpreted(na_calls.flash, *bad, (3, 5, 5))


def test_cpu_tensor_without_the_interpreter(compiling):
    q, k, v = fused_qkv((1, 3, 6, 7, 1, 16), F16)
    with pytest.raises(ValueError, match="needs a GPU tensor; got cpu"):
        compiling(na_calls.flash, q, k, v, (3, 5, 5))


def test_package_works_without_triton():
    code = """
import sys
sys.modules["triton"] = None
import torch
from layers.neighborhood_attention import na3d_flash_attn, neighborhood_attention_sdpa
x = torch.ones(1, 3, 5, 5, 1, 16)
neighborhood_attention_sdpa(x, x, x, (3, 5, 5))
try:
    na3d_flash_attn(x, x, x, (3, 5, 5))
except RuntimeError as error:
    assert "needs Triton, which is not installed" in str(error)
else:
    raise SystemExit("no error")
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_configs_refuse_what_could_not_run():
    with pytest.raises(ValueError, match=r"must cover block_q . max_kernel_w - 1 = 33"):
        RowConfig(max_kernel_w=18, block_q=16, block_kv=32, warps=4, stages=2)
    with pytest.raises(ValueError, match="tile queries 48"):
        TileConfig((3, 4, 4), 64, 4, 2)
    with pytest.raises(ValueError, match="skip_exp needs"):
        TileConfig((4, 4, 2), 64, 4, 2, skip_exp=True)
    for tile, block_kv, walk in (((4, 4, 4), 32, "t"), ((4, 4, 4), 64, "x"), ((2, 4, 8), 64, "w")):
        with pytest.raises(ValueError, match="walk must be"):
            TileConfig(tile, block_kv, 4, 2, skip_exp=True, walk=walk)
    with pytest.raises(ValueError, match="schedule row of sm90 takes kernels up to 33 wide; got 35"):
        SM90.row((3, 5, 35), 64)


def _cells(*, grid=(22, 50, 98), batch=1, heads=4, steps=None, first=0, dtype=torch.bfloat16):
    """q, k, v of head_dim 64 that share one cell's memory: only shapes and strides count."""
    steps = steps or (1 << 20, 1 << 12, 1 << 8)
    q = torch.empty(1, dtype=dtype).expand(batch, *grid, heads, 64)
    kv = torch.empty(80, dtype=torch.bfloat16)[first:].as_strided((1, 1, 1, 1, 1, 64), (0, *steps, 64, 1))
    kv = kv.expand(batch, 1, 1, 1, heads, 64)
    return q, kv, kv


@pytest.mark.parametrize(
    ("kernel", "cells", "taken"),
    [
        ((11, 11, 11), {}, True),
        ((3, 3, 5), {}, True),
        ((3, 5, 3), {}, False),  # 8 keys lie in more than two rows of the union
        ((21, 5, 91), {}, False),  # masks of a plane would not fit into shared memory
        ((11, 11, 11), {"steps": (1 << 28, 1 << 12, 1 << 8)}, False),  # offsets pass 2**31
        ((11, 11, 11), {"steps": (2**31 // 16, 1 << 12, 1 << 8)}, False),  # also in the rows that padding adds
        ((11, 11, 11), {"steps": (1 << 12, 2**31 // 18, 1 << 8)}, False),  # or in the planes that the rest counts from
        ((11, 11, 11), {"steps": (1 << 20, 1 << 12, 65)}, False),  # cells are not at multiples of 16 bytes
        ((11, 11, 11), {"first": 1}, False),
        ((11, 11, 11), {"batch": 1 << 14}, False),  # more than a grid may have
        ((3, 5, 5), {"grid": (4, 1 << 18, 98)}, False),
    ],
    ids=str,
)
def test_calls_that_the_hopper_kernel_does_not_take(kernel, cells, taken):
    q, k, v = _cells(**cells)
    axes = check_inputs(*(torch.empty(q.shape, device="meta") for _ in range(3)), kernel)
    assert bool(plan_walks(q, k, v, axes, kernel, SM90.tile(kernel, 64))) == taken
    assert not plan_walks(q, k, v, axes, kernel, configs.load("sm80").tile(kernel, 64))
    assert not plan_walks(_cells(dtype=F16)[0], k, v, axes, kernel, SM90.tile(kernel, 64))


@pytest.mark.parametrize("multiprocessors", [1, 132, 10_000])
@pytest.mark.parametrize("kernel", [(3, 5, 5), (3, 7, 7), (5, 9, 7), (11, 11, 11)], ids=str)
def test_walks_take_every_tile_once(kernel, multiprocessors, monkeypatch):
    """Segments and programs abreast as kernel_tile_hopper.py counts them; few multiprocessors make long walks."""
    monkeypatch.setattr(hopper, "_multiprocessors", lambda _: multiprocessors)
    q, k, v = _cells()
    axes = check_inputs(*(torch.empty(q.shape, device="meta") for _ in range(3)), kernel)
    for axis in "thw":
        config = dataclasses.replace(SM90.tile((11, 11, 11), 64), walk=axis)
        walks = plan_walks(q, k, v, axes, kernel, config)
        tiles, rows, columns = (-(-axes[i].q_len // config.tile[i]) for i in walks.order)
        assert (walks.grid[0], walks.grid[2]) == (columns, 4)
        segments, left = divmod(walks.grid[1], rows * walks.abreast)
        assert left == 0
        if kernel == (11, 11, 11):
            assert multiprocessors != 1 or segments == 1
            assert multiprocessors != 10_000 or walks.tiles == 1
        taken = [
            first + walks.abreast * (segment * walks.tiles + n)
            for first in range(walks.abreast)
            for segment in range(segments)
            for n in range(walks.tiles)
        ]
        assert sorted(tile for tile in taken if tile < tiles) == list(range(tiles))
