"""na3d_flash_attn on a GPU, in the dtypes it ships in, against tiled SDPA in fp32."""

import dataclasses

import pytest
import torch

from layers.neighborhood_attention import MAX_SOFTMAX_BOUND, hopper, na3d_flash_attn, neighborhood_attention_sdpa
from layers.neighborhood_attention import configs as na_configs

pytestmark = pytest.mark.accelerator

# bf16 rounds inputs, probabilities and outputs; measured 2.3e-3 to 3.1e-3 on H200.
RELATIVE_L2, MAX_ABS = 5e-3, 5e-2

PUBLISHED = [
    ((1, 18, 32, 48, 32, 64), (3, 7, 7)),
    ((1, 36, 64, 96, 8, 64), (3, 5, 5)),
    ((1, 40, 96, 96, 8, 64), (3, 5, 5)),
    ((1, 16, 80, 32, 4, 64), (11, 11, 11)),
    ((1, 79, 192, 192, 4, 64), (11, 11, 11)),
    ((1, 4, 8, 128, 4, 64), (3, 5, 27)),
]
OURS = [
    ((2, 5, 9, 18, 3, 64), (3, 5, 5)),
    ((1, 11, 11, 11, 1, 64), (11, 11, 11)),
    ((1, 12, 13, 17, 2, 128), (11, 11, 11)),
    ((1, 7, 33, 50, 3, 16), (3, 7, 7)),
    ((1, 3, 7, 7, 32, 64), (3, 7, 7)),
    ((1, 5, 12, 23, 2, 256), (5, 3, 7)),
    ((1, 9, 20, 23, 4, 32), (5, 7, 9)),
    ((1, 9, 11, 12, 2, 64), (3, 3, 5)),  # a union of fewer cells than a block of keys
    ((1, 23, 9, 13, 2, 64), (21, 3, 5)),
]


def fused_qkv(shape, *, dtype=torch.bfloat16, gain=1.0, seed=0):
    """q, k, v as views of one projection, q and k RMS-normed and q scaled: |q . k| <= gain * sqrt(head_dim)."""
    generator = torch.Generator("cuda").manual_seed(seed)
    heads, head_dim = shape[-2:]
    qkv = torch.empty(*shape[:-2], 3, heads, head_dim, dtype=dtype, device="cuda")
    for i, scale in enumerate((gain * head_dim**-0.5, 1.0, None)):
        for b in range(shape[0]):
            for t in range(shape[1]):  # by plane: the whole in fp32 would not fit at the largest grid
                x = torch.randn(*shape[2:], device="cuda", generator=generator)
                if scale is not None:
                    x *= scale * x.square().mean(-1, keepdim=True).rsqrt()
                qkv[b, t, :, :, i] = x
    return qkv.unbind(4)


def check(actual, q, k, v, kernel, **offsets):
    expected = neighborhood_attention_sdpa(q.float(), k.float(), v.float(), kernel, **offsets)
    difference = actual.float() - expected
    assert (difference.norm() / expected.norm()).item() <= RELATIVE_L2
    assert difference.abs().max().item() <= MAX_ABS


@pytest.fixture(autouse=True)
def poisoned_outputs():
    """torch.empty gives NaN, so an element that no program writes is seen."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
    torch.cuda.empty_cache()


@pytest.mark.parametrize("bound", [None, 8.2], ids=["online", "bounded"])
@pytest.mark.parametrize("schedule", ["row", "tile"])
@pytest.mark.parametrize(("shape", "kernel"), PUBLISHED + OURS, ids=str)
def test_bf16_matches_sdpa(shape, kernel, schedule, bound):
    arch = na_configs.load(na_configs.arch_of(torch.device("cuda", 0)))
    config = getattr(arch, schedule)(kernel, shape[-1])
    q, k, v = fused_qkv(shape)
    bound = bound and bound * (shape[-1] / 64) ** 0.5
    check(na3d_flash_attn(q, k, v, kernel, config=config, softmax_bound=bound), q, k, v, kernel)


@pytest.mark.parametrize(("shape", "kernel"), [PUBLISHED[0], PUBLISHED[1], PUBLISHED[3], OURS[3]], ids=str)
def test_the_triton_tile_kernel(shape, kernel):
    """Also where the json has the Hopper kernel: calls that it does not take run this one."""
    config = na_configs.load(na_configs.arch_of(torch.device("cuda", 0))).tile(kernel, shape[-1])
    q, k, v = fused_qkv(shape)
    check(na3d_flash_attn(q, k, v, kernel, config=dataclasses.replace(config, walk="")), q, k, v, kernel)


@pytest.mark.parametrize("long", [True, False], ids=["long", "short"])
@pytest.mark.parametrize("axis", ["t", "h", "w"])
@pytest.mark.parametrize("tile", [(4, 4, 4), (2, 4, 8)], ids=str)
@pytest.mark.parametrize("kernel", [(3, 7, 7), (7, 5, 11), (11, 11, 11)], ids=str)
def test_walks_of_the_hopper_kernel(kernel, tile, axis, long, monkeypatch):
    """Along each axis, over a line of tiles and over one; with a rest and without; flags of either half of a tile."""
    if tile["thw".index(axis)] == 8:
        pytest.skip("a walk takes tiles of 2 or 4 along its axis")
    config = dataclasses.replace(na_configs.load("sm90").tile((11, 11, 11), 64), tile=tile, walk=axis)
    monkeypatch.setattr(hopper, "_multiprocessors", lambda _: 1 if long else 100_000)
    q, k, v = fused_qkv((2, 29, 41, 38, 2, 64))
    check(na3d_flash_attn(q, k, v, kernel, config=config, softmax_bound=8.2), q, k, v, kernel)
    q = q + torch.zeros_like(q)
    q[:, ::5, 7:] *= 30.0
    q[:, 3::7, :7, ::9] *= 30.0
    check(na3d_flash_attn(q, k, v, kernel, config=config), q, k, v, kernel)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@pytest.mark.parametrize("contiguous", [True, False], ids=["contiguous", "views"])
def test_layouts(contiguous, dtype):
    q, k, v = fused_qkv((1, 12, 20, 28, 2, 64), dtype=dtype)
    if contiguous:
        q, k, v = (x.contiguous() for x in (q, k, v))
    check(na3d_flash_attn(q, k, v, (5, 7, 7)), q, k, v, (5, 7, 7))
    check(na3d_flash_attn(q, k, v.clone(), (5, 7, 7)), q, k, v, (5, 7, 7))  # v's strides differ from k's
    padded = torch.nn.functional.pad(k, (0, 1))[..., :-1]  # no cell but the first at a multiple of 16 bytes
    check(na3d_flash_attn(q, padded, v, (5, 7, 7)), q, k, v, (5, 7, 7))


@pytest.mark.parametrize("kernel", [(3, 7, 7), (3, 5, 5), (11, 11, 11)], ids=str)
def test_parts_with_offsets_are_parts_of_the_whole(kernel):
    grid = (14, 30, 26)
    q, k, v = fused_qkv((1, *grid, 2, 64))
    whole = na3d_flash_attn(q, k, v, kernel)
    for axis in (1, 2, 3):
        for first in (0, 5, grid[axis - 1] - 6):
            begin = min(max(first - kernel[axis - 1] // 2, 0), grid[axis - 1] - kernel[axis - 1])
            end = min(max(first + 5 - kernel[axis - 1] // 2, 0), grid[axis - 1] - kernel[axis - 1]) + kernel[axis - 1]
            q_start, kv_start = [0, 0, 0], [0, 0, 0]
            q_start[axis - 1], kv_start[axis - 1] = first, begin
            keys, values = (x.narrow(axis, begin, end - begin) for x in (k, v))
            part = na3d_flash_attn(
                q.narrow(axis, first, 6), keys, values, kernel, q_start=q_start, kv_start=kv_start, grid=grid
            )
            error = (part.float() - whole.narrow(axis, first, 6).float()).norm() / whole.float().norm()
            assert error.item() < 2e-3  # bf16 probabilities sum in another order


@pytest.mark.parametrize("gain", [30.0, 1e-3], ids=["sums-beyond-2**64", "flat"])
def test_scores_beyond_the_constant_reference(gain):
    """Row sums outside 2**+-64 raise the tile's flag; those tiles are computed again with a running maximum."""
    q, k, v = fused_qkv((1, 12, 20, 28, 2, 64), gain=gain)
    q = q + torch.zeros_like(q)
    q[:, 6:] = q[:, 6:] * 1e-3  # half the tiles keep the fast result
    check(na3d_flash_attn(q, k, v, (3, 7, 7)), q, k, v, (3, 7, 7))


def test_largest_bound():
    q, k, v = fused_qkv((1, 8, 16, 16, 2, 64), gain=8.5)
    assert MAX_SOFTMAX_BOUND > 8.5 * 8 * 1.02
    check(na3d_flash_attn(q, k, v, (3, 7, 7), softmax_bound=MAX_SOFTMAX_BOUND), q, k, v, (3, 7, 7))


def test_more_than_2_to_the_31_elements():
    """Fused projections of 8e9 elements, an output of 2.7e9; checked where the offsets are largest."""
    shape, kernel = (1, 40, 512, 512, 4, 64), (3, 5, 5)
    q, k, v = fused_qkv(shape)
    assert q.numel() > 2**31
    arch = na_configs.load("sm90")
    for config in (
        arch.tile(kernel, 64),
        dataclasses.replace(arch.tile(kernel, 64), walk=""),
        arch.row(kernel, 64),
    ):
        out = na3d_flash_attn(q, k, v, kernel, config=config)
        last = (slice(None), slice(37, 40), slice(500, 512), slice(490, 512))
        keys = (slice(None), slice(36, 40), slice(498, 512), slice(488, 512))
        offsets = {"q_start": (37, 500, 490), "kv_start": (36, 498, 488), "grid": shape[1:4]}
        check(out[last], q[last], k[keys], v[keys], kernel, **offsets)
        assert not out[:, ::13].isnan().any()


def test_race_picks_a_schedule_once(tmp_path, monkeypatch):
    from layers.neighborhood_attention import flash, race

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    arguments = (na_configs.load("default"), torch.device("cuda", 0), (3, 5, 5), 64, torch.bfloat16)
    options = {"attend": na3d_flash_attn, "triton": flash.triton_version()}
    race.faster_schedule.cache_clear()
    winner = race.faster_schedule(*arguments, **options)
    assert winner in ("row", "tile")
    race.faster_schedule.cache_clear()
    monkeypatch.setattr(race, "_milliseconds", lambda *_: pytest.fail("measured again despite the cache"))
    assert race.faster_schedule(*arguments, **options) == winner
