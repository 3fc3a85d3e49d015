"""The fused ops on a GPU in the dtypes they ship in, against fp64, also past 2**31 elements; the decode of them all."""

import copy

import fused_calls
import pytest
import torch
import torch.nn.functional as F
from diffusers.models.autoencoders import ltx2_diffusion_decoder
from fused_cases import (
    BYTES,
    EPS,
    HEAD_EPS,
    HEADS,
    MLP,
    QKV,
    SILU,
    TOKENS,
    Half,
    error,
    frequencies,
    gated,
    hidden_frames,
    modulation,
    norm64,
    randn,
    rotated64,
)

from layers.fused import heads, launch, narrow, pixels, reference, tokens
from layers.fused.narrow import fold_norm
from layers.neighborhood_attention import na3d_flash_attn, neighborhood_attention_sdpa
from layers.neighborhood_attention.backend import Target, architecture
from layers.neighborhood_attention.builtin import make_triton
from layers.neighborhood_attention.routing import RoutedAttention
from runner_models.ltx2.attention import NeighborhoodAttnProcessor
from runner_models.ltx2.build import build_component, component_config
from runner_models.ltx2.decoder import exact
from runner_models.ltx2.decoder.geometry import stages_of

pytestmark = pytest.mark.accelerator

BF16, F16 = torch.bfloat16, torch.float16
DTYPES = [BF16, F16]
# Relative L2 to fp64. One rounding to bf16 is 1.7e-3; the MLP rounds its hidden units too. fp16 rounds 8 times finer.
TOLERANCE = {BF16: 3e-3, F16: 4e-4}
DEVICE = "cuda"


@pytest.fixture(autouse=True)
def _memory():
    yield
    torch.cuda.empty_cache()


def needs(gib):
    total = torch.cuda.get_device_properties(0).total_memory / 2**30
    if total < gib:
        pytest.skip(f"needs {gib} GiB of GPU memory, found {total:.0f}")


@pytest.mark.parametrize("modulated", [False, True], ids=["plain", "modulated"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [*TOKENS, (2, 3, 17, 31, 512)], ids=str)
def test_norms(shape, dtype, modulated):
    x, y = (randn(*shape, dtype=dtype, seed=seed, device=DEVICE) for seed in (0, 1))
    gain = randn(shape[-1], dtype=dtype, seed=2, device=DEVICE)
    assert launch.runs_kernels(x)
    fold = {"eps": EPS, **(modulation(shape[0], shape[-1], dtype, DEVICE) if modulated else {})}
    got = fused_calls.rms_norm(x, gain, where="frames", **fold)
    assert error(got, norm64(x, gain, **fold)) <= TOLERANCE[dtype]
    added, normed = fused_calls.add_rms_norm(x, y, gain, where="frames", **fold)
    assert torch.equal(added, x + y)
    assert error(normed, norm64(x + y, gain, **fold)) <= TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SILU, ids=str)
def test_silu_mul(shape, dtype):
    gate, up = gated(shape, dtype, DEVICE)
    want = F.silu(gate.double()) * up.double()
    assert error(fused_calls.silu_mul(gate, up), want) <= TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("shape", "patch"), BYTES, ids=str)
def test_bytes(shape, patch, dtype):
    hidden = hidden_frames(shape, patch, dtype, DEVICE)
    assert torch.equal(fused_calls.patches_to_bytes(hidden, patch), reference.patches_to_bytes(hidden, patch))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("grid", "count", "head_dim", "where", "starts"), HEADS, ids=str)
def test_norm_rotate_heads(grid, count, head_dim, where, starts, dtype):
    qkv = 3 * randn(*grid, 3 * count * head_dim, dtype=dtype, device=DEVICE)
    gains, own = randn(2, head_dim, seed=1, device=DEVICE), frequencies(head_dim, DEVICE)
    q, k, v = qkv.unflatten(-1, (3, count, head_dim)).unbind(-3)
    want = [rotated64(x, gain, own, starts, eps=EPS) for x, gain in zip((q, k), gains, strict=True)]
    got = fused_calls.norm_rotate_heads(qkv, gains, own, starts, eps=EPS, head_dim=head_dim, where=where)
    for name, a, b in zip("qk", got, want, strict=False):
        assert error(a, b) <= TOLERANCE[dtype], name
    assert torch.equal(got[2], v)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("grid", "channels", "count", "head_dim", "where", "starts"),
    [*QKV, ((2, 3, 17, 31), 256, 4, 64, "rows", (50, 3, 7))],
    ids=str,
)
def test_project_heads(grid, channels, count, head_dim, where, starts, dtype):
    half, own = Half(grid, channels, 3 * count * head_dim, dtype, device=DEVICE), frequencies(head_dim, DEVICE)
    into = fold_norm(half.weights[0], half.bias, *half.norm)
    gains = randn(2, head_dim, seed=8, device=DEVICE)
    got = fused_calls.project_heads(
        half.x, half.pending, into, gains, own, starts, eps=EPS, head_eps=HEAD_EPS, head_dim=head_dim, where=where
    )
    for name, a, b in zip("qkv", got, half.heads(into, gains, own, starts, head_dim), strict=True):
        assert error(a, b) <= TOLERANCE[dtype], name


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("grid", "channels", "hidden"), [*MLP, ((2, 3, 17, 31), 256, 1024)], ids=str)
def test_gated_mlp(grid, channels, hidden, dtype):
    half = Half(grid, channels, hidden, dtype, device=DEVICE)
    assert narrow.serves(half.x, hidden=hidden, head_dim=16)
    gate, up = (fold_norm(weight, None, *half.norm) for weight in half.weights)
    got = fused_calls.gated_mlp(half.x, half.pending, gate, up, half.down, eps=EPS)
    # fp16 rounds the hidden units as finely as the result.
    assert error(got, half.mlp(gate, up)) <= TOLERANCE[dtype] * (2 if dtype == F16 else 1)


FAR = (86, 384, 256)
"""T, H, W: 8.5e6 tokens, of 256 channels 2.16e9 elements, more than 2**31."""
TAIL = (slice(None), slice(FAR[0] - 1, None), slice(FAR[1] - 32, None))
STARTS = (FAR[0] - 1, FAR[1] - 32, 0)


def far(*shape, seed=0):
    """bf16, filled in slices: no fp32 copy of a large tensor."""
    torch.manual_seed(seed)
    out = torch.empty(shape, dtype=BF16, device=DEVICE)
    for part in out.view(-1).split(2**28):
        part.normal_()
    return out


def no_gaps(*tensors):
    """Every 13th frame is there."""
    return not any(x[:, ::13].isnan().any() for x in tensors)


def test_norms_past_2_to_the_31():
    needs(30)
    x, y, gain = far(1, *FAR, 256), far(1, *FAR, 256, seed=1), randn(256, dtype=BF16, seed=2, device=DEVICE)
    assert x.numel() > 2**31
    total = x[TAIL] + y[TAIL]
    out = fused_calls.poisoned(tokens.add_rms_norm_)(x, y, gain, eps=EPS)
    assert torch.equal(x[TAIL], total)
    assert error(out[TAIL], norm64(total, gain, eps=EPS)) <= TOLERANCE[BF16]
    assert no_gaps(out)


def test_batch_strides_past_2_to_the_31():
    """The last frames of two long clips."""
    needs(12)
    count, shape = 32 * 64 * 768, (1, 32, 64, 768)
    x = far(2, 2**31 + count)[:, -count:].unflatten(1, shape)
    assert x.stride(0) > 2**31
    gain = randn(768, dtype=BF16, seed=2, device=DEVICE)
    assert error(tokens.rms_norm(x, gain, eps=EPS), norm64(x, gain, eps=EPS)) <= TOLERANCE[BF16]
    gains, own = randn(2, 64, seed=1, device=DEVICE), frequencies(64, DEVICE)
    out = tuple(torch.full((2, 1, 32, 64, 4, 64), float("nan"), dtype=BF16, device=DEVICE) for _ in range(3))
    heads.norm_rotate_heads(x, heads.HeadNorms(gains, EPS), heads.rotary_table(own, shape[:3]), out=out)
    for a, b, gain in zip(out, x.unflatten(-1, (3, 4, 64)).unbind(-3), gains, strict=False):
        assert error(a, rotated64(b, gain, own, (0, 0, 0), eps=EPS)) <= TOLERANCE[BF16]


@pytest.mark.parametrize("in_place", [True, False], ids=["in place", "apart"])
def test_heads_past_2_to_the_31(in_place):
    needs(40)
    qkv, gains, own = far(1, *FAR, 3 * 256), randn(2, 64, seed=1, device=DEVICE), frequencies(64, DEVICE)
    parts = qkv.unflatten(-1, (3, 4, 64)).unbind(-3)
    before = [x[TAIL].clone() for x in parts]
    out = parts if in_place else tuple(torch.full_like(parts[0], float("nan")) for _ in range(3))
    rotary = heads.rotary_table(own, FAR)
    heads.norm_rotate_heads(qkv, heads.HeadNorms(gains, EPS), rotary, out=out)
    for a, b, gain in zip(out, before, gains, strict=False):
        assert error(a[TAIL], rotated64(b, gain, own, STARTS, eps=EPS)) <= TOLERANCE[BF16]
    assert torch.equal(out[2][TAIL], before[2])
    assert no_gaps(*out)


def test_project_heads_past_2_to_the_31():
    needs(30)
    x, own = far(1, *FAR, 256), frequencies(64, DEVICE)
    half, gains = Half((1, 1, 1, 1), 256, 768, BF16, device=DEVICE), randn(2, 64, seed=8, device=DEVICE)
    into = fold_norm(half.weights[0], half.bias, *half.norm)
    out = tuple(torch.full((1, *FAR, 4, 64), float("nan"), dtype=BF16, device=DEVICE) for _ in range(3))
    norms, rotary = heads.HeadNorms(gains, HEAD_EPS), heads.rotary_table(own, FAR)
    narrow.project_heads(x, half.pending, into, norms, rotary, eps=EPS, out=out)
    for a, b in zip(out, half.heads(into, gains, own, STARTS, 64, x[TAIL]), strict=True):
        assert error(a[TAIL], b) <= TOLERANCE[BF16]
    assert no_gaps(*out)


def test_gated_mlp_past_2_to_the_31():
    needs(12)
    x, half = far(1, *FAR, 256), Half((1, 1, 1, 1), 256, 1024, BF16, device=DEVICE)
    gate, up = (fold_norm(weight, None, *half.norm) for weight in half.weights)
    first, last = x[:, :1, :32].clone(), x[TAIL].clone()
    narrow.gated_mlp_(x, half.pending, narrow.pack_mlp(gate, up, half.down), eps=EPS)
    assert error(x[TAIL], half.mlp(gate, up, last)) <= TOLERANCE[BF16]
    assert error(x[:, :1, :32], half.mlp(gate, up, first)) <= TOLERANCE[BF16]


def test_silu_mul_and_bytes_past_2_to_the_31():
    needs(20)
    gate, up = (far(2**31 + 12345, seed=seed) for seed in (0, 1))
    want = reference.silu_mul(gate[-5000:], up[-5000:])
    assert error(tokens.silu_mul_(gate, up)[-5000:], want) <= TOLERANCE[BF16]
    del gate, up
    hidden = far(1, 456, 384, 256, 48)
    assert hidden.numel() > 2**31
    out = pixels.patches_to_bytes(hidden, 4)
    for frame in (0, 455):
        assert torch.equal(out[:, frame : frame + 1], reference.patches_to_bytes(hidden[:, frame : frame + 1], 4))


@pytest.fixture(scope="module")
def decoder():
    """The released architecture, random weights; gains and modulation that are not 1 and 0."""
    torch.manual_seed(0)
    model = build_component("diffusion_decoder", component_config("diffusion_decoder"), device=DEVICE, dtype=BF16)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.copy_(1 + 0.3 * torch.randn_like(parameter))
        elif name.endswith("scale_shift_table"):
            parameter.copy_(0.3 * torch.randn_like(parameter))
    return model


def stock(model, latents, attention):
    """The untiled stock decode, (B, 3, F, H, W)."""
    model.set_attn_processor(NeighborhoodAttnProcessor(attention))
    with torch.inference_mode():
        return model.decode(latents, return_dict=False)[0]


def test_the_exact_decode_is_as_good_as_the_stock_one(decoder, monkeypatch):
    """At most 1.2 times as far from the stock decode in fp32 as that is in bf16; whole and in chunks."""

    def noise(shape, generator=None, device=None, dtype=None):
        """The same in every dtype."""
        return torch.randn(shape, generator=torch.Generator().manual_seed(3)).to(device, BF16).to(dtype)

    for module in (ltx2_diffusion_decoder, exact):
        monkeypatch.setattr(module, "randn_tensor", noise)
    grid = (4, 8, 9)
    latents = torch.randn(1, 128, *grid, generator=torch.Generator().manual_seed(1)).to(DEVICE, BF16)
    want = stock(copy.deepcopy(decoder).float(), latents.float(), neighborhood_attention_sdpa)
    allowed = 1.2 * error(stock(decoder, latents, na3d_flash_attn), want)
    kernels = tuple(dict.fromkeys(stage.kernel for stage in stages_of(decoder.config, grid)))
    device = torch.device(DEVICE, torch.cuda.current_device())
    target = Target(device, architecture(device), BF16, decoder.config["decoder_head_dim"], kernels)
    ours = exact.ExactDecoder(decoder, attention=RoutedAttention([make_triton(target)]))
    for chunk in (None, 8):
        got = torch.cat(list(ours.decode(latents, chunk_frames=chunk)), dim=1).transpose(1, 2)
        assert error(got, want) <= allowed, chunk
