"""Every fused op compiles for every architecture to code that could be fast: facts from the machine code."""

from pathlib import Path

import fused_compile
import pytest
import triton_compile

from layers import fused
from layers.fused import launch
from layers.fused.launch import BLOCKS, Blocks

ARCHS = [arch for arch in BLOCKS if arch != "default"]
HALVES = ("qkv", "mlp")
PASSES = [*((op, c) for c in (256, 512, 1024, 2048) for op in ("norm", "heads")), ("silu", 1024), ("bytes", 48)]


def _passes():
    """The decoder's last stage on the newest architecture of each maker is the fast part."""
    for arch in ARCHS:
        for op, channels in PASSES:
            fast = arch in ("gfx950", "sm90") and channels in (256, 1024, 48)
            yield pytest.param(arch, op, channels, marks=[] if fast else pytest.mark.slow)


@pytest.mark.parametrize(("arch", "op", "channels"), _passes(), ids=str)
def test_passes(compiling, arch, op, channels):
    for fact in compiling(fused_compile.compile_facts, arch, op, channels):
        check(fact, arch)
        assert fact["narrow_stores"] == 0, fact
        if op != "bytes":  # which gathers its three colours
            assert fact["wide_loads"] > 0, fact
            assert fact["wide_stores"] > 0, fact
        if op in ("heads", "silu"):
            assert fact["narrow_loads"] == 0, fact  # a norm reads its gains so, once a program


@pytest.mark.parametrize("op", HALVES)
@pytest.mark.parametrize("arch", ARCHS)
def test_halves(compiling, arch, op):
    (fact,) = compiling(fused_compile.compile_facts, arch, op, 256)
    check(fact, arch)
    check_products(fact, arch, op, BLOCKS[arch])


def check(fact, arch):
    assert fact["shared"] <= triton_compile.SHARED_LIMIT[arch], fact
    assert fact["spills"] in ([0], []), fact
    # NVIDIA kernels at their register limit keep a few words on the stack around the loop.
    assert fact["stack_bytes"] <= (0 if arch.startswith("gfx") else 96), fact
    assert fact["alias"] == [], fact


def check_products(fact, arch, op, blocks):
    assert fact["matrix"], fact
    assert fact["wide_loads"] + fact["bulk_loads"] > 0, fact
    assert (fact["bulk_loads"] > 0) == blocks.tma, fact
    assert fact["narrow_loads"] == fact["narrow_stores"] == 0, fact
    if arch == "sm90":
        assert fact["matrix"] == ["HGMMA"], fact
    if arch == "sm100":
        return  # tcgen05 multiplies a whole block in one instruction of one thread: nothing to count
    assert fact["flops_per_block"] == [algebraic_flops(op, blocks)], fact


def algebraic_flops(op, blocks, channels=256):
    """Of one step of the loop: a head, or a block of hidden units. More is work that several warps repeat."""
    if op == "qkv":
        return 2 * blocks.qkv[0] * fused_compile.HEAD_DIM * channels
    tokens, hidden = blocks.mlp[:2]
    return 2 * tokens * channels * 3 * hidden


TOO_MANY_WARPS = Blocks(mlp=(64, 32, 8, 1), qkv=(64, 8, 1))


@pytest.mark.parametrize("op", HALVES)
def test_repeated_work_would_be_seen(compiling, op):
    (fact,) = compiling(fused_compile.compile_facts, "gfx942", op, 256, blocks=TOO_MANY_WARPS)
    assert fact["flops_per_block"][0] >= 2 * algebraic_flops(op, TOO_MANY_WARPS)
    with pytest.raises(AssertionError):
        check_products(fact, "gfx942", op, TOO_MANY_WARPS)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["gfx942", "sm80"])
def test_spills_would_be_seen(compiling, arch):
    blocks = Blocks(mlp=(128, 64, 4, 2), qkv=(64, 4, 2))
    (fact,) = compiling(fused_compile.compile_facts, arch, "mlp", 256, blocks=blocks)
    assert sum(fact["spills"]) > 0
    assert fact["stack_bytes"] > 96
    with pytest.raises(AssertionError):
        check({**fact, "shared": 0}, arch)


@pytest.mark.parametrize("op", ["norm", "silu", "heads", "bytes", "qkv", "mlp"])
def test_another_chunk_does_not_compile_again(compiling, op):
    """Streaming calls with ever other numbers of frames."""
    first, *others = (compiling(fused_compile.specializations, op, (frames, 32, 48)) for frames in (16, 1, 5))
    assert all(other == first for other in others)


def test_nothing_is_tuned_at_run_time():
    for file in Path(fused.__file__).parent.glob("*.py"):
        assert "autotune" not in file.read_text(), file


def test_for_which_architectures(caplog):
    launch.served.cache_clear()
    with caplog.at_level("INFO"):
        assert all(launch.served(arch) for arch in (*ARCHS, "sm86", "sm120"))
        assert not caplog.messages
        assert not any(launch.served(arch) for arch in ("sm75", "gfx90a", "gfx1100", "cpu", "sm"))
    assert "fused kernels: not for gfx90a; plain torch instead" in caplog.messages
    launch.served.cache_clear()
