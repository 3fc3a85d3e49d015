"""The decoder's attention on a GPU: each backend that this machine has, against tiled SDPA, in bf16.

    python -m pytest -q tests/integration/accelerator/test_decoder_attention_gpu.py

A backend that cannot be used is skipped with its reason. The tests of the whole decoder need diffusers.
"""

import functools
import logging

import pytest
import torch

from layers.neighborhood_attention import neighborhood_attention_sdpa
from layers.neighborhood_attention.backend import Target, architecture
from layers.neighborhood_attention.fastest import Grid, choose_fastest
from layers.neighborhood_attention.select import MAKERS, Selection, select_attention

pytestmark = pytest.mark.accelerator

RELATIVE_L2 = 1e-2  # bf16 against bf16 of another order of sums; a window off by one is at 1e-1

KERNELS = ((3, 7, 7), (3, 5, 5), (11, 11, 11))
GRIDS = [
    ((3, 7, 7), (1, 10, 16, 24, 32, 64)),
    ((3, 7, 7), (2, 5, 9, 19, 2, 64)),
    ((3, 5, 5), (1, 13, 34, 50, 8, 64)),
    ((11, 11, 11), (1, 16, 40, 32, 4, 64)),
    ((11, 11, 11), (1, 12, 13, 17, 1, 64)),
]
ALL = [pytest.param(name, marks=pytest.mark.rocm) if name == "aiter" else name for name in MAKERS]


def target() -> Target:
    device = torch.device("cuda", 0)
    return Target(device, architecture(device), torch.bfloat16, head_dim=64, kernel_sizes=KERNELS)


@functools.cache
def chosen(name: str) -> Selection | str:
    """The named attention, or why this machine lacks it."""
    try:
        return select_attention(name, target())
    except ValueError as error:
        return str(error)


@pytest.fixture
def selection(request: pytest.FixtureRequest) -> Selection:
    found = chosen(request.param)
    if isinstance(found, str):
        pytest.skip(found)
    found.attention.routed.clear()
    return found


def fused_qkv(shape: tuple[int, ...], dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator("cuda").manual_seed(sum(shape))
    qkv = torch.randn(*shape[:4], 3, *shape[4:], device="cuda", generator=generator)
    qkv[..., 0, :, :] *= shape[-1] ** -0.5
    return qkv.to(dtype).unbind(4)


def relative(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return ((got.float() - wanted.float()).norm() / wanted.float().norm()).item()


@pytest.mark.parametrize("selection", ALL, indirect=True)
@pytest.mark.parametrize(("kernel", "shape"), GRIDS, ids=str)
def test_values(selection: Selection, kernel: tuple[int, int, int], shape: tuple[int, ...]) -> None:
    q, k, v = fused_qkv(shape)
    got = selection.attention(q, k, v, kernel)
    assert selection.attention.routed == {}
    assert relative(got, neighborhood_attention_sdpa(q, k, v, kernel)) <= RELATIVE_L2


@pytest.mark.parametrize("selection", ALL, indirect=True)
@pytest.mark.parametrize("kernel", KERNELS, ids=str)
def test_a_part_of_the_grid(selection: Selection, kernel: tuple[int, int, int]) -> None:
    """Rows 10 to 13 of 24 with the keys that they see, as a shard or a chunk calls it."""
    grid = (13, 24, 30)
    q, k, v = fused_qkv((1, *grid, 4, 64))
    begin, end = 10 - kernel[1] // 2, 14 + kernel[1] // 2
    got = selection.attention(
        q[:, :, 10:14], k[:, :, begin:end], v[:, :, begin:end], kernel,
        q_start=(0, 10, 0), kv_start=(0, begin, 0), grid=grid,
    )  # fmt: skip
    assert selection.attention.routed == {}
    assert relative(got, neighborhood_attention_sdpa(q, k, v, kernel)[:, :, 10:14]) <= RELATIVE_L2


@pytest.mark.rocm
@pytest.mark.parametrize("selection", ["aiter"], indirect=True)
def test_narrow_grids_are_those_of_sdpa_to_the_bit(selection: Selection) -> None:
    for kernel, shape in (((3, 7, 7), (1, 10, 16, 8, 4, 64)), ((3, 5, 5), (1, 5, 9, 15, 2, 64))):
        q, k, v = fused_qkv(shape)
        assert torch.equal(selection.attention(q, k, v, kernel), neighborhood_attention_sdpa(q, k, v, kernel))
    assert selection.attention.routed == {"aiter: narrower than 16": 2}


@pytest.mark.parametrize("selection", ["triton"], indirect=True)
def test_what_our_kernel_refuses_is_sdpa_to_the_bit(selection: Selection) -> None:
    for shape, dtype in (((1, 5, 9, 8, 2, 24), torch.bfloat16), ((1, 5, 9, 8, 2, 64), torch.float32)):
        q, k, v = fused_qkv(shape, dtype)
        assert torch.equal(selection.attention(q, k, v, (3, 5, 5)), neighborhood_attention_sdpa(q, k, v, (3, 5, 5)))
    assert selection.attention.routed.total() == 2


def test_auto_says_what_it_takes(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "layers")
    selection = select_attention("auto", target())
    lines = [record.getMessage() for record in caplog.records if record.getMessage().startswith("decoder attention: ")]
    for name, reason in selection.refused.items():
        assert f"decoder attention: {name} refused: {reason}" in lines
    used, detail = selection.describe()["used"], selection.describe()["detail"]
    assert f"decoder attention: using {used} ({detail})" in lines
    assert "triton" not in selection.refused, "our kernel works on every GPU this is tested on"


def test_fastest_takes_what_it_measured_to_be_best() -> None:
    selection = select_attention("fastest", target())
    assert len(selection.attention.backends) >= 2
    grids = [Grid((3, 7, 7), (10, 16, 24), 32, 4), Grid((3, 5, 5), (34, 32, 48), 8, 2)]
    grids.append(Grid((11, 11, 11), (33, 96, 96), 4, 8))
    table = choose_fastest(selection, grids)
    assert set(table) == {str(kernel) for kernel in KERNELS}
    for kernel in KERNELS:
        times = table[str(kernel)]
        assert all(ms > 0 for ms in times.values())
        assert selection.attention.backend_for(kernel).name == min(times, key=lambda name: times[name])
        assert times["triton"] < times["sdpa"], times


@functools.cache
def decoder() -> torch.nn.Module:
    """The released widths and kernels with random weights, one or two blocks a stage."""
    from runner_models.ltx2.build import build_component, component_config

    torch.manual_seed(0)
    config = component_config("diffusion_decoder", {"decoder_stage_depths": [1, 1, 1, 1, 2]})
    return build_component("diffusion_decoder", config, device="cuda", dtype=torch.bfloat16)


@torch.no_grad()
def decode(attention: object) -> torch.Tensor:
    from runner_models.ltx2.attention import install_attention

    model = decoder()
    install_attention(model, attention, fuse=True)  # type: ignore[arg-type]
    latents = torch.randn(1, 128, 3, 10, 17, generator=torch.Generator().manual_seed(1)).to("cuda", torch.bfloat16)
    return model.decode(latents, generator=torch.Generator("cuda").manual_seed(2), return_dict=False)[0]  # type: ignore[operator]


@pytest.mark.parametrize("selection", ALL, indirect=True)
def test_the_decoder_gives_the_same_video(selection: Selection) -> None:
    pytest.importorskip("diffusers")
    wanted = decode(neighborhood_attention_sdpa)
    got = decode(selection.attention)
    assert selection.attention.routed == {}
    assert not got.isnan().any()
    assert relative(got, wanted) <= RELATIVE_L2


@torch.no_grad()
def test_fused_weights_take_no_memory_and_follow_an_offload() -> None:
    pytest.importorskip("diffusers")
    from runner_models.ltx2.qkv import fuse_qkv, project

    module = decoder().get_submodule("decoder.det_stages.0.0.attn")
    x = torch.randn(1, 3, 7, 9, 2048, device="cuda", dtype=torch.bfloat16)
    wanted = [layer(x).unflatten(-1, (32, 64)) for layer in (module.to_q, module.to_k, module.to_v)]
    module.to("cpu").to("cuda")  # each weight has its own memory again
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    fuse_qkv(module)
    assert abs(torch.cuda.memory_allocated() - before) < 2**20
    for _ in range(2):
        for got, want in zip(project(module, x), wanted, strict=True):
            assert relative(got, want) <= 5e-3  # one GEMM of another shape
        module.to("cpu").to("cuda")
