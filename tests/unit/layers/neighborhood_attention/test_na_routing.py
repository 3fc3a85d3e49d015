"""What the chosen attention does with one call: offsets, strides, and calls that its kernel cannot take."""

import itertools

import pytest
import torch
from stand_ins import absent, target, with_aiter, with_natten

from layers.neighborhood_attention import builtin, neighborhood_attention_reference, neighborhood_attention_sdpa
from layers.neighborhood_attention.aiter import make_aiter
from layers.neighborhood_attention.backend import Backend
from layers.neighborhood_attention.geometry import window_start
from layers.neighborhood_attention.natten import make_natten
from layers.neighborhood_attention.routing import RoutedAttention

# fp32 on both sides: only the order of sums differs. A wrong window is at 1e-1.
TOLERANCE = 1e-5


def qkv(shape, *, dtype=torch.float32, fused=True, seed=0):
    """q, k, v (B, T, H, W, heads, head_dim) as views of one projection, or each contiguous."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape[:4], 3, *shape[4:], generator=generator)
    x[..., 0, :, :] *= shape[-1] ** -0.5
    parts = x.to(dtype).unbind(4)
    return parts if fused else tuple(part.contiguous() for part in parts)


def relative(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return ((got.float() - wanted.float()).norm() / wanted.float().norm()).item()


def parts(grid, kernel, axis, first, count):
    """Slices and offsets of `count` queries from `first` on one axis, with the keys that they see."""
    begin = window_start(first, kernel[axis], grid[axis])
    end = window_start(first + count - 1, kernel[axis], grid[axis]) + kernel[axis]
    q, kv, q_start, kv_start = [slice(None)] * 4, [slice(None)] * 4, [0, 0, 0], [0, 0, 0]
    q[1 + axis], kv[1 + axis] = slice(first, first + count), slice(begin, end)
    q_start[axis], kv_start[axis] = first, begin
    return tuple(q), tuple(kv), {"q_start": q_start, "kv_start": kv_start, "grid": grid}


@pytest.fixture
def natten(monkeypatch: pytest.MonkeyPatch) -> RoutedAttention:
    with_natten(monkeypatch)
    return RoutedAttention([make_natten(target())])


@pytest.fixture
def aiter(monkeypatch: pytest.MonkeyPatch) -> RoutedAttention:
    with_aiter(monkeypatch)
    return RoutedAttention([make_aiter(target("gfx950"))])


@pytest.mark.parametrize("axis", [0, 1, 2], ids="THW")
def test_a_backend_without_offsets_gives_every_part_of_the_whole(natten: RoutedAttention, axis: int) -> None:
    grid, kernel = (7, 9, 8), (3, 5, 5)
    q, k, v = qkv((2, *grid, 2, 16))
    whole = neighborhood_attention_reference(q, k, v, kernel)
    for first, count in itertools.product(range(grid[axis]), (1, 2, 5)):
        if first + count > grid[axis]:
            continue
        q_part, kv_part, offsets = parts(grid, kernel, axis, first, count)
        got = natten(q[q_part], k[kv_part], v[kv_part], kernel, **offsets)
        assert relative(got, whole[q_part]) <= TOLERANCE, (first, count)
    assert natten.routed == {}


def test_offsets_on_all_axes_with_more_keys_than_needed(natten: RoutedAttention) -> None:
    grid, kernel = (8, 10, 9), (3, 5, 3)
    q, k, v = qkv((1, *grid, 2, 16))
    whole = neighborhood_attention_reference(q, k, v, kernel)
    inside = (slice(None), slice(3, 5), slice(4, 7), slice(6, 9))
    keys = (slice(None), slice(1, 8), slice(1, 9), slice(3, 9))
    offsets = {"q_start": (3, 4, 6), "kv_start": (1, 1, 3), "grid": grid}
    assert relative(natten(q[inside], k[keys], v[keys], kernel, **offsets), whole[inside]) <= TOLERANCE
    assert natten.routed == {}


def test_keys_that_no_query_sees_are_left_out() -> None:
    """A border of a shard comes with all of the shard's keys; columns stay 32, for AITER."""
    seen = []
    attention = RoutedAttention(
        [
            Backend(
                "recording",
                lambda q, k, v, kernel: (
                    seen.append(tuple(k.shape[1:4])) or neighborhood_attention_sdpa(q, k, v, kernel)
                ),
                takes_offsets=False,
            )
        ]
    )
    grid, kernel = (6, 20, 50), (3, 5, 5)
    q, k, v = qkv((1, *grid, 1, 16))
    wanted = neighborhood_attention_sdpa(q, k, v, kernel)
    for rows, columns, region in [
        ((0, 2), (0, 50), (6, 5, 50)),
        ((17, 20), (0, 50), (6, 5, 50)),
        ((8, 10), (0, 3), (6, 6, 32)),
        ((8, 10), (48, 50), (6, 6, 32)),
        ((8, 10), (20, 24), (6, 6, 32)),
        ((0, 20), (2, 49), (6, 20, 50)),
    ]:
        part = (slice(None), slice(None), slice(*rows), slice(*columns))
        got = attention(q[part], k, v, kernel, q_start=(0, rows[0], columns[0]))
        assert relative(got, wanted[part]) <= TOLERANCE
        assert seen.pop() == region


def test_natten_gets_contiguous_tensors(natten: RoutedAttention) -> None:
    """The stand-in, as the real one, is wrong for others."""
    q, k, v = qkv((1, 4, 6, 6, 2, 16))
    assert not q.is_contiguous()
    wanted = neighborhood_attention_reference(q, k, v, (3, 5, 5))
    assert relative(natten(q, k, v, (3, 5, 5)), wanted) <= TOLERANCE
    raw = make_natten(target()).attend.__closure__
    assert raw is not None
    function = next(cell.cell_contents for cell in raw if callable(cell.cell_contents))
    assert relative(function(q, k, v, kernel_size=(3, 5, 5), scale=1.0), wanted) > 0.5


LIMITS = [
    ("narrower than 16", (1, 3, 5, 15, 1, 16), (3, 5, 5), torch.bfloat16),
    ("a kernel wider than 33", (1, 3, 3, 40, 1, 16), (3, 3, 35), torch.bfloat16),
    ("a kernel wider than 17 on a grid narrower than 32", (1, 3, 3, 31, 1, 16), (3, 3, 19), torch.bfloat16),
    ("head_dim not a power of two from 16", (1, 3, 5, 16, 1, 24), (3, 5, 5), torch.bfloat16),
    ("head_dim not a power of two from 16", (1, 3, 5, 16, 1, 8), (3, 5, 5), torch.bfloat16),
    ("not bfloat16", (1, 3, 5, 16, 1, 16), (3, 5, 5), torch.float16),
]


@pytest.mark.parametrize(("reason", "shape", "kernel", "dtype"), LIMITS, ids=lambda value: str(value))
def test_aiter_limits_go_to_sdpa(aiter: RoutedAttention, reason: str, shape, kernel, dtype) -> None:
    q, k, v = qkv(shape, dtype=dtype)
    got = aiter(q, k, v, kernel)
    assert torch.equal(got, neighborhood_attention_sdpa(q, k, v, kernel))
    assert aiter.routed == {f"aiter: {reason}": 1}


@pytest.mark.parametrize(
    ("shape", "kernel"), [((1, 3, 3, 33, 1, 16), (3, 3, 33)), ((1, 3, 5, 16, 1, 16), (3, 5, 15))], ids=str
)
def test_aiter_at_its_limits(aiter: RoutedAttention, shape, kernel) -> None:
    q, k, v = qkv(shape, dtype=torch.bfloat16)
    assert relative(aiter(q, k, v, kernel), neighborhood_attention_sdpa(q.float(), k.float(), v.float(), kernel)) < 1e-2
    assert (aiter.calls, aiter.routed) == (1, {})


def test_aiter_goes_by_the_width_of_the_keys(aiter: RoutedAttention) -> None:
    """A narrow part of a wide grid: its keys are what the kernel gets."""
    grid, kernel = (3, 5, 40), (3, 5, 5)
    q, k, v = qkv((1, *grid, 1, 16), dtype=torch.bfloat16)
    for first, count, routed in ((10, 4, 1), (10, 12, 1), (0, 16, 1)):
        q_part, kv_part, offsets = parts(grid, kernel, 2, first, count)
        aiter(q[q_part], k[kv_part], v[kv_part], kernel, **offsets)
        assert aiter.routed["aiter: narrower than 16"] == routed, (first, count)


def test_natten_limits_go_to_sdpa(natten: RoutedAttention) -> None:
    q, k, v = qkv((1, 4, 6, 6, 2, 16))
    assert torch.equal(natten(q, k, v, (1, 5, 5)), neighborhood_attention_sdpa(q, k, v, (1, 5, 5)))
    assert natten.routed == {"natten: a kernel size of 1": 1}


def test_what_no_backend_can_do_is_an_error(natten: RoutedAttention) -> None:
    q, k, v = qkv((1, 4, 4, 6, 2, 16))
    with pytest.raises(ValueError, match="kernel_size 5 on axis H is longer than the grid there"):
        natten(q, k, v, (3, 5, 5))
    with pytest.raises(ValueError, match="the windows of q need keys"):
        natten(q, k[:, 1:], v[:, 1:], (3, 3, 3), kv_start=(1, 0, 0), grid=(4, 4, 6))
    assert (natten.calls, natten.routed) == (0, {})


def test_what_our_kernel_refuses_goes_to_sdpa() -> None:
    """The real kernel: on a CPU, outside the interpreter, it refuses every call."""
    pytest.importorskip("triton")
    attention = RoutedAttention([Backend("triton", builtin._flash, takes_offsets=True)])
    grid, kernel = (7, 9, 8), (3, 5, 5)
    q, k, v = qkv((1, *grid, 2, 24))
    q_part, kv_part, offsets = parts(grid, kernel, 1, 4, 3)
    got = attention(q[q_part], k[kv_part], v[kv_part], kernel, **offsets)
    assert torch.equal(got, neighborhood_attention_sdpa(q[q_part], k[kv_part], v[kv_part], kernel, **offsets))
    [(reason, count)] = attention.routed.items()
    assert reason.startswith("triton: na3d_flash_attn ")
    assert count == 1


@pytest.mark.parametrize(
    ("shape", "kernel", "dtype"),
    [
        ((1, 3, 5, 8, 1, 24), (3, 5, 5), torch.float16),
        ((1, 3, 5, 8, 1, 8), (3, 5, 5), torch.float16),
        ((1, 3, 5, 8, 1, 16), (3, 5, 5), torch.float64),
    ],
    ids=str,
)
def test_each_limit_of_our_kernel(interpreted, shape, kernel, dtype) -> None:
    q, k, v = (x.to(dtype) for x in qkv(shape))
    equal, routed = interpreted(routed_call, q, k, v, kernel)
    assert equal
    assert sum(routed.values()) == 1


def routed_call(q, k, v, kernel):
    torch.set_num_threads(1)
    attention = RoutedAttention([Backend("triton", builtin._flash, takes_offsets=True)])
    return torch.equal(attention(q, k, v, kernel), neighborhood_attention_sdpa(q, k, v, kernel)), attention.routed


def test_a_fault_of_a_kernel_is_not_swallowed(monkeypatch: pytest.MonkeyPatch) -> None:
    absent(monkeypatch, "kernels")

    def broken(*_, **__):
        raise RuntimeError("illegal memory access")

    with_natten(monkeypatch, broken)
    attention = RoutedAttention([make_natten(target())])
    q, k, v = qkv((1, 4, 6, 6, 2, 16))
    with pytest.raises(RuntimeError, match="illegal memory access"):
        attention(q, k, v, (3, 5, 5))
