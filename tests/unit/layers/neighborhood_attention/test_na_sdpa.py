"""The reference against a by-hand window, and tiled SDPA against the reference."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from layers.neighborhood_attention import neighborhood_attention_reference, neighborhood_attention_sdpa
from layers.neighborhood_attention.geometry import window_start

# Relative L2 to the fp32 reference: accumulation order in fp32, rounding of inputs and outputs below it.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}


def make_qkv(shape, kv_shape=None, *, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(s, generator=generator) for s in (shape, kv_shape or shape, kv_shape or shape))
    # Sharper than head_dim**-0.5: a window one cell off then moves the output by tens of percent, not by noise.
    return (3 * shape[-1] ** -0.5 * q).to(dtype), k.to(dtype), v.to(dtype)


def relative_l2(actual, expected):
    return ((actual.double() - expected.double()).norm() / expected.double().norm()).item()


def test_window_is_centred_inside_and_shifted_inward_at_the_border():
    assert [window_start(p, 5, 8) for p in range(8)] == [0, 0, 0, 1, 2, 3, 3, 3]
    assert [window_start(p, 3, 3) for p in range(3)] == [0, 0, 0]


def test_reference_sees_exactly_its_window():
    """Changing a key moves the queries whose window holds it and no other."""
    q, k, v = make_qkv((1, 4, 5, 7, 1, 8))
    before = neighborhood_attention_reference(q, k, v, (3, 3, 5))
    v[0, 1, 4, 2] += 100.0
    moved = (neighborhood_attention_reference(q, k, v, (3, 3, 5)) != before).any(-1)[0, ..., 0]
    expected = torch.zeros(4, 5, 7, dtype=torch.bool)
    for t in range(4):
        for h in range(5):
            for w in range(7):
                starts = (min(max(t - 1, 0), 1), min(max(h - 1, 0), 2), min(max(w - 2, 0), 2))
                expected[t, h, w] = all(s <= i < s + kk for s, i, kk in zip(starts, (1, 4, 2), (3, 3, 5), strict=True))
    assert torch.equal(moved, expected)


GRIDS = [
    ((1, 4, 5, 7, 2, 8), (3, 3, 5)),
    ((2, 5, 9, 18, 3, 16), (3, 5, 5)),
    ((1, 12, 13, 17, 1, 16), (11, 11, 11)),
    ((1, 3, 7, 7, 1, 8), (3, 7, 7)),
    ((1, 1, 6, 40, 1, 8), (1, 5, 27)),
    ((1, 9, 9, 9, 1, 64), (1, 1, 1)),
]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("shape", "kernel"), GRIDS, ids=str)
def test_sdpa_matches_reference(shape, kernel, dtype):
    q, k, v = make_qkv(shape, dtype=dtype)
    exact = torch.promote_types(dtype, torch.float32)
    expected = neighborhood_attention_reference(q.to(exact), k.to(exact), v.to(exact), kernel)
    for budget in ({}, {"mask_bytes": 4096, "kv_bytes": 16 * shape[-1] * kernel[0] * kernel[1] * kernel[2]}):
        actual = neighborhood_attention_sdpa(q, k, v, kernel, **budget)
        assert actual.dtype == dtype
        assert relative_l2(actual, expected) < TOLERANCE[dtype]


@pytest.mark.parametrize(
    ("q_start", "q_len", "kv_start", "kv_len"),
    [
        ((0, 0, 0), (2, 9, 9), (0, 0, 0), (4, 9, 9)),
        ((3, 4, 0), (2, 3, 9), (2, 1, 0), (4, 8, 9)),
        ((5, 0, 6), (1, 2, 3), (2, 0, 2), (4, 7, 7)),
    ],
    ids=["t-head", "t-and-h-middle", "corner"],
)
@pytest.mark.parametrize(
    "op", [neighborhood_attention_reference, neighborhood_attention_sdpa], ids=["reference", "sdpa"]
)
def test_offsets_give_the_part_of_the_whole(op, q_start, q_len, kv_start, kv_len):
    q, k, v = make_qkv((2, 6, 9, 9, 2, 8))
    whole = neighborhood_attention_reference(q, k, v, (3, 7, 7))

    def part(x, start, length):
        return x[(slice(None), *(slice(s, s + n) for s, n in zip(start, length, strict=True)))]

    keys, values = part(k, kv_start, kv_len), part(v, kv_start, kv_len)
    actual = op(part(q, q_start, q_len), keys, values, (3, 7, 7), q_start=q_start, kv_start=kv_start, grid=(6, 9, 9))
    assert relative_l2(actual, part(whole, q_start, q_len)) < TOLERANCE[torch.float32]


class LargestAllocation(TorchDispatchMode):
    """The largest storage, in bytes, that any operator below it returns, and a list of the operators called."""

    def __init__(self, *known):
        super().__init__()
        self.known = {x.untyped_storage().data_ptr() for x in known}
        self.nbytes, self.calls = 0, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.calls.append(str(func))
        for x in result if isinstance(result, tuple | list) else [result]:
            if isinstance(x, torch.Tensor) and x.untyped_storage().data_ptr() not in self.known:
                self.nbytes = max(self.nbytes, x.untyped_storage().nbytes())
        return result


@pytest.mark.parametrize(
    ("q_shape", "kv_shape", "kernel", "offsets"),
    [
        ((1, 1, 1, 300, 1, 8), None, (1, 1, 101), {}),
        ((1, 40, 1, 1, 6, 8), None, (31, 1, 1), {}),
        ((2, 6, 12, 3, 2, 8), (2, 6, 12, 9, 2, 8), (3, 5, 9), {"q_start": (0, 0, 3)}),
        ((1, 2, 4, 6, 2, 8), (1, 8, 20, 20, 2, 8), (3, 7, 7), {"q_start": (3, 7, 9)}),
    ],
    ids=["h-is-1", "hw-are-1", "narrower-than-kernel", "sub-slice"],
)
def test_no_allocation_passes_its_budget(q_shape, kv_shape, kernel, offsets):
    mask_bytes, kv_bytes = 8192, 2 * 4 * 8 * 300
    q, k, v = make_qkv(q_shape, kv_shape)
    with LargestAllocation(q, k, v) as seen:
        actual = neighborhood_attention_sdpa(q, k, v, kernel, mask_bytes=mask_bytes, kv_bytes=kv_bytes, **offsets)
    assert 0 < seen.nbytes <= max(mask_bytes, kv_bytes // 2, actual.nbytes)
    assert relative_l2(actual, neighborhood_attention_reference(q, k, v, kernel, **offsets)) < 2e-6


def test_masks_are_built_without_synchronising():
    """Copies from Python lists and reads of values are what would wait for a device."""
    q, k, v = make_qkv((1, 6, 9, 9, 2, 8))
    with LargestAllocation(q, k, v) as seen:
        neighborhood_attention_sdpa(q, k, v, (3, 5, 5))
    waiting = ("lift_fresh", "_local_scalar_dense", "_to_copy", "nonzero", "item")
    assert [name for name in seen.calls if any(word in name for word in waiting)] == []


def test_calls_stay_few_at_the_largest_stage():
    """121x384x256x4 heads: the tiles of one geometry share calls, on an accelerator's budgets."""
    from layers.neighborhood_attention import sdpa
    from layers.neighborhood_attention.geometry import Axis

    axes = [Axis(n, 11, 0, n, 0, n) for n in (121, 384, 256)]
    tile = sdpa._choose_tile(axes, 2**24, 2**20, sdpa._GATHER_COST["accelerator"])
    geometries = [sdpa._geometries(axis, length) for axis, length in zip(axes, tile, strict=True)]
    assert [sum(run.count for runs in g.values() for run in runs) for g in geometries] == [
        -(-axis.length // length) for axis, length in zip(axes, tile, strict=True)
    ]
    assert max(len(g) for g in geometries) <= 8


BAD_INPUT = {
    "even kernel": ({"kernel_size": (3, 4, 5)}, "kernel_size 4 on axis H must be odd"),
    "kernel longer than its axis": ({"kernel_size": (3, 11, 5)}, "kernel_size 11 on axis H is longer than the grid"),
    "two kernel sizes": ({"kernel_size": (3, 5)}, "must have three values"),
    "kv_start without grid": ({"kernel_size": (3, 5, 5), "kv_start": (1, 0, 0)}, "needs grid"),
    "q outside the grid": ({"kernel_size": (3, 5, 5), "q_start": (1, 0, 0)}, r"q covers \[1, 7\) on axis T"),
    "keys missing": ({"kernel_size": (3, 5, 5), "grid": (8, 9, 9)}, r"need keys \[0, 7\); k, v hold \[0, 6\)"),
}


@pytest.mark.parametrize(
    "op", [neighborhood_attention_reference, neighborhood_attention_sdpa], ids=["reference", "sdpa"]
)
@pytest.mark.parametrize(("arguments", "message"), BAD_INPUT.values(), ids=BAD_INPUT)
def test_bad_arguments_say_what_is_allowed(op, arguments, message):
    q, k, v = make_qkv((1, 6, 9, 9, 2, 8))
    with pytest.raises(ValueError, match=message):
        op(q, k, v, **arguments)


def test_bad_tensors_say_what_is_allowed():
    q, k, v = make_qkv((1, 6, 9, 9, 2, 8))
    for bad, message in (
        ((q[0], k, v), "must be .B, T, H, W, heads, head_dim"),
        ((q, k, v[:, :5]), "k and v must have one shape"),
        ((q[..., :4], k, v), "must agree in all but T, H, W"),
        ((q.half(), k, v), "one floating-point dtype"),
        ((q.long(), k.long(), v.long()), "one floating-point dtype"),
        ((q[:, :0], k, v), "no dimension may be 0"),
    ):
        with pytest.raises(ValueError, match=message):
            neighborhood_attention_sdpa(*bad, (3, 5, 5))


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("keys", [1, 4, 5, 30], ids=lambda keys: f"{keys}-keys")
def test_a_window_beyond_the_budget_is_walked_in_pieces(keys, dtype):
    """Pieces of part of a row, of rows and of planes; with offsets, and none larger than the budget."""
    q, k, v = make_qkv((1, 2, 3, 4, 2, 8), (1, 5, 6, 7, 2, 8), dtype=dtype)
    offsets = {"q_start": (3, 2, 1), "kv_start": (1, 0, 0), "grid": (6, 6, 7)}
    exact = torch.promote_types(dtype, torch.float32)
    budget = 2 * 8 * keys * torch.finfo(exact).bits // 8
    with LargestAllocation(q, k, v) as seen:
        actual = neighborhood_attention_sdpa(q, k, v, (3, 5, 5), kv_bytes=budget, **offsets)
    assert seen.nbytes <= max(budget // 2, actual.nbytes)
    expected = neighborhood_attention_reference(q.to(exact), k.to(exact), v.to(exact), (3, 5, 5), **offsets)
    assert relative_l2(actual, expected) < TOLERANCE[dtype]
