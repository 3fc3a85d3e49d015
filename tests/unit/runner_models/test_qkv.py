"""One GEMM for Q, K and V over the module's own weights, whatever is done to the module in between."""

import copy
import ctypes
import gc
import logging
import weakref
from pathlib import Path

import pytest
import safetensors.torch
import torch
from diffusers import LTX2VideoDiffusionDecoderModel
from diffusers.models.autoencoders.ltx2_diffusion_decoder import LTX2VideoVaeNeighborhoodAttention

from layers.neighborhood_attention import neighborhood_attention_sdpa
from runner_models.ltx2 import qkv
from runner_models.ltx2.attention import NeighborhoodAttnProcessor, install_attention
from runner_models.ltx2.qkv import fuse_qkv, project

# fp32, one GEMM against three: the order of sums. A wrong weight is at 1.
TOLERANCE = 1e-6
NAMES = ("to_q", "to_k", "to_v")


@pytest.fixture(autouse=True)
def say_again() -> None:
    qkv._say_fused_again.cache_clear()


def attention(dim: int = 48, seed: int = 0) -> LTX2VideoVaeNeighborhoodAttention:
    torch.manual_seed(seed)
    module = LTX2VideoVaeNeighborhoodAttention(dim, (3, 5, 5), head_dim=16).requires_grad_(False)
    for norm in (module.norm_q, module.norm_k):
        norm.weight.copy_(1 + 0.3 * torch.randn(16))
    return module


def inputs(dim: int = 48, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(1, 3, 5, 6, dim, generator=torch.Generator().manual_seed(1)).to(dtype)


def is_fused(module: torch.nn.Module) -> bool:
    return all(qkv._is_fused([getattr(getattr(module, n), kind) for n in NAMES]) for kind in ("weight", "bias"))


def check(module: LTX2VideoVaeNeighborhoodAttention, *, tolerance: float = TOLERANCE) -> None:
    """project against the three layers one by one, with the weights the module has now."""
    x = inputs(module.to_q.in_features, module.to_q.weight.dtype)
    wanted = [getattr(module, name)(x).unflatten(-1, (module.heads, 16)) for name in NAMES]
    got = project(module, x)
    for name, a, b in zip(NAMES, got, wanted, strict=True):
        assert a.shape == b.shape
        assert ((a - b).float().norm() / b.float().norm()).item() <= tolerance, name
    assert is_fused(module)


def storages(module: torch.nn.Module) -> dict[int, int]:
    found = [p.untyped_storage() for p in module.parameters()]
    return {s.data_ptr(): s.nbytes() for s in found}


def test_project_equals_the_three_layers_in_one_product() -> None:
    module = attention()
    fuse_qkv(module)
    check(module)
    q, k, v = project(module, inputs())
    assert q.untyped_storage().data_ptr() == k.untyped_storage().data_ptr() == v.untyped_storage().data_ptr()
    module.to_k.weight.mul_(2)  # the module's own weights are the fused ones
    check(module)


def test_the_processor_equals_the_stock_projection() -> None:
    module, x = attention(), inputs()
    wanted = module.to_out[0](neighborhood_attention_sdpa(*module.project_qkv(x), (3, 5, 5)).flatten(-2))
    module.set_processor(NeighborhoodAttnProcessor(neighborhood_attention_sdpa))
    assert ((module(x) - wanted).norm() / wanted.norm()).item() <= 1e-5


def test_no_second_copy_of_the_weights() -> None:
    module = attention(dim=512)  # 6 MiB of Q, K and V
    before = sum(storages(module).values())
    old = [weakref.ref(getattr(module, name).weight.untyped_storage()) for name in NAMES]
    fuse_qkv(module)
    gc.collect()
    assert sum(storages(module).values()) == before
    assert not any(ref() is not None and ref().nbytes() == 512 * 512 * 4 for ref in old)


def test_resident_memory() -> None:
    def resident() -> int:
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # what earlier tests left in the heap may serve, and keep, the weights
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    with torch.device("meta"):
        module = LTX2VideoVaeNeighborhoodAttention(3072, (3, 5, 5), head_dim=16)
    module = module.to_empty(device="cpu").requires_grad_(False)
    for parameter in module.parameters():
        parameter.fill_(1)
    before = resident()
    fuse_qkv(module)
    grown = resident() - before
    assert abs(grown) < 2**22, grown  # one weight more would be 9 times that


def test_save_and_load(tmp_path: Path) -> None:
    module, other = attention(), attention(seed=1)
    fuse_qkv(module)
    safetensors.torch.save_file(module.state_dict(), tmp_path / "weights.safetensors")
    loaded = safetensors.torch.load_file(tmp_path / "weights.safetensors")
    assert set(loaded) == set(attention().state_dict())
    for name, value in attention().state_dict().items():
        assert torch.equal(loaded[name], value) or "norm" in name, name
    fuse_qkv(other)
    other.load_state_dict(loaded)
    assert is_fused(other), "values are copied into the views"
    check(other)
    assert torch.equal(other.to_v.weight, module.to_v.weight)


def decoder() -> LTX2VideoDiffusionDecoderModel:
    from runner_models.ltx2.build import component_config

    config = component_config(
        "diffusion_decoder",
        {
            "decoder_stage_channels": [128, 64, 64, 64, 64],
            "decoder_stage_depths": [1, 1, 1, 1, 1],
            "decoder_upsample_channel_reductions": [2, 1, 1, 1],
            "decoder_t_emb_dim": 32,
        },
    )
    config.pop("_class_name")
    torch.manual_seed(0)
    return LTX2VideoDiffusionDecoderModel.from_config(config).eval().requires_grad_(False)


def test_save_pretrained(tmp_path: Path) -> None:
    model = decoder()
    wanted = {name: value.clone() for name, value in model.state_dict().items()}
    install_attention(model, neighborhood_attention_sdpa, fuse=True)
    modules = [m for m in model.modules() if isinstance(m, LTX2VideoVaeNeighborhoodAttention)]
    assert len(modules) == 5
    assert all(is_fused(m) for m in modules)
    model.save_pretrained(tmp_path)
    again = LTX2VideoDiffusionDecoderModel.from_pretrained(tmp_path)
    assert set(again.state_dict()) == set(wanted)
    assert all(torch.equal(value, wanted[name]) for name, value in again.state_dict().items())


@pytest.mark.parametrize("change", ["to(dtype)", "deepcopy", "assign", "new parameter", "one moved"])
def test_broken_aliasing_is_seen_and_mended(change: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "runner_models")
    module, tolerance = attention(), TOLERANCE
    fuse_qkv(module)
    if change == "to(dtype)":
        module.to(torch.bfloat16)
        tolerance = 1e-2
    elif change == "deepcopy":
        module = copy.deepcopy(module)
    elif change == "assign":
        module.load_state_dict(attention(seed=1).state_dict(), assign=True)
    elif change == "new parameter":
        module.to_k.weight = torch.nn.Parameter(torch.randn_like(module.to_k.weight), requires_grad=False)
    else:
        module.to_v.bias.data = module.to_v.bias.data.clone()
    assert not is_fused(module)
    with torch.inference_mode():
        check(module, tolerance=tolerance)
    check(module, tolerance=tolerance)
    assert [record.getMessage() for record in caplog.records] == [
        "decoder attention: the weights of Q, K and V have been moved, cast or replaced; joined again (said once)"
    ]
    assert not module.to_q.weight.is_inference()


def test_model_offload(caplog: pytest.LogCaptureFixture) -> None:
    """accelerate moves the whole model to and fro around a call; on a CPU a cast stands in for the move."""
    from accelerate.hooks import ModelHook, add_hook_to_module

    class Move(ModelHook):
        def pre_forward(self, module, *args, **kwargs):
            module.to(torch.float32)
            return args, kwargs

        def post_forward(self, module, output):
            module.to(torch.float64)
            return output

    caplog.set_level(logging.INFO, "runner_models")
    module, x = attention(), inputs()
    module.set_processor(NeighborhoodAttnProcessor(neighborhood_attention_sdpa))
    wanted = module(x)
    add_hook_to_module(module, Move())
    for _ in range(3):
        assert ((module(x) - wanted).norm() / wanted.norm()).item() <= 1e-5
        assert not is_fused(module)
    assert len(caplog.records) == 1


def test_layer_wise_offload_is_refused() -> None:
    from accelerate import cpu_offload

    module = attention()
    fuse_qkv(module)
    cpu_offload(module, execution_device=torch.device("cpu"))
    with pytest.raises(ValueError, match="layer-wise offloading is not supported, model offloading is"):
        project(module, inputs())


def test_weights_of_two_dtypes_are_refused() -> None:
    module = attention()
    module.to_v.to(torch.bfloat16)
    with pytest.raises(ValueError, match=r"on one device in one dtype to be used together; got to_q torch\.float32"):
        fuse_qkv(module)


@pytest.mark.parametrize("name", NAMES)
def test_an_adapter_is_refused(name: str) -> None:
    from peft import LoraConfig, inject_adapter_in_model

    module = inject_adapter_in_model(LoraConfig(r=2, target_modules=[name]), attention())
    for call in (lambda: fuse_qkv(module), lambda: project(module, inputs())):
        with pytest.raises(ValueError, match=rf"{name} of the decoder is a Linear, .* adapter is attached"):
            call()


def test_neighbours_in_memory_are_not_one_block() -> None:
    """Three allocations may happen to follow each other; a view from the first into the others must not be made."""
    module = attention()
    buffer = bytearray(3 * module.to_q.weight.nbytes)
    for i, name in enumerate(NAMES):
        weight = getattr(module, name).weight
        apart = torch.frombuffer(buffer, dtype=torch.float32, count=weight.numel(), offset=i * weight.nbytes)
        weight.data = apart.view(weight.shape).copy_(weight)
    assert not qkv._is_fused([getattr(module, name).weight for name in NAMES])
    check(module)
