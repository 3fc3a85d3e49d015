"""Every committed config compiles for its architecture to code that could be fast: facts from the machine code."""

import dataclasses
import math
from pathlib import Path

import na_compile
import pytest
import triton_compile

from layers import neighborhood_attention
from layers.neighborhood_attention import configs
from layers.neighborhood_attention.configs import RowConfig

DECODER_KERNELS = ((11, 11, 11), (3, 7, 7), (3, 5, 5))
WIDE = (3, 5, 27)


def _cases():
    """(arch, schedule, kernel, head_dim): all that a json can choose; the decoder's largest stage is the fast part."""
    for arch in triton_compile.TARGETS:
        for schedule in ("tile", "row"):
            for kernel, head_dim in [*((k, 64) for k in (*DECODER_KERNELS, WIDE)), ((3, 5, 5), 128), ((3, 5, 5), 256)]:
                fast = kernel == (11, 11, 11) and (schedule == "tile" or arch == "sm90")
                yield pytest.param(arch, schedule, kernel, head_dim, marks=[] if fast else pytest.mark.slow)


@pytest.mark.parametrize(("arch", "schedule", "kernel", "head_dim"), _cases(), ids=str)
def test_machine_code(compiling, arch, schedule, kernel, head_dim):
    config = getattr(configs.load(arch), schedule)(kernel, head_dim)
    for bound in (None, 8.0):
        for fact in compiling(na_compile.compile_facts, arch, config, kernel, head_dim, bound=bound):
            check(fact, arch, config, head_dim)


def check(fact, arch, config, head_dim):
    assert fact["shared"] <= triton_compile.SHARED_LIMIT[arch], fact
    assert fact["wide_loads"] > 0, fact
    assert fact["narrow_loads"] == 0, fact
    assert fact["alias"] == [], fact
    assert fact["matrix"], fact
    assert fact["flops_per_block"] or arch == "sm100", fact
    if arch == "sm90" and not isinstance(config, RowConfig):
        assert any("HGMMA" in name for name in fact["matrix"]), fact  # wgmma; a row's 16 queries are too few for it
    # No spill where the work is. NVIDIA kernels at their register limit keep a few words on the stack around the loops.
    assert fact["spills"][:1] in ([0], []), fact
    assert fact["stack_bytes"] <= (0 if arch.startswith("gfx") else 96), fact
    if isinstance(config, RowConfig):
        # The published blocks give 16 or 32 rows to 4 warps, which on AMD repeat the scores: up to 3x the work.
        flops = na_compile.algebraic_flops(config, head_dim)
        assert all(flops <= found <= flops * config.warps for found in fact["flops_per_block"]), fact
        return
    if arch == "sm100" or (head_dim == 256 and arch == "sm80"):
        # tcgen05 multiplies a whole block in one instruction of one thread: nothing to count. head_dim 256 on sm80 has
        # registers for 32 queries only, of which 8 warps repeat the scores.
        return
    block = 2 * math.prod(config.tile) * config.block_kv
    mask = block * config.mask_channels  # the compiler may hoist it out of the loop over planes
    allowed = {mask, block * 2 * head_dim, block * 2 * head_dim + mask}
    assert set(fact["flops_per_block"]) <= allowed, (fact, allowed)
    assert max(fact["flops_per_block"]) >= block * 2 * head_dim


def test_duplicated_work_would_be_seen(compiling):
    """The count above is not blind: twice the warps a tile can use repeat the score product."""
    config = dataclasses.replace(configs.load("sm80").tile((11, 11, 11), 64), warps=8)
    facts = compiling(na_compile.compile_facts, "sm80", config, (11, 11, 11), 64)
    with pytest.raises(AssertionError):
        check(facts[0], "sm80", config, 64)


def test_names_say_schedule_blocks_and_kernel(compiling):
    tile, row = (getattr(configs.load("sm90"), name)((11, 11, 11), 64) for name in ("tile", "row"))
    names = [f["name"] for c in (tile, row) for f in compiling(na_compile.compile_facts, "sm90", c, (11, 11, 11), 64)]
    assert names == [
        "na3d_tile_hopper_4x4x4_kv64_k11x11x11_checked",
        "na3d_tile_exact_4x4x4_kv64_k11x11x11",
        "na3d_row_q16_kv32_k11x11x11",
    ]


def test_another_grid_does_not_compile_again(compiling):
    """Streaming calls with ever other lengths: no number of the geometry may specialise a kernel."""
    assert compiling(na_compile.specializations, (16, 32, 48)) == compiling(na_compile.specializations, (17, 31, 47))


def test_nothing_is_tuned_at_run_time():
    for file in Path(neighborhood_attention.__file__).parent.glob("*.py"):
        assert "autotune" not in file.read_text(), file


def test_every_architecture_has_a_config():
    for arch in configs.ARCHS:
        loaded = configs.load(arch)
        assert loaded.arch == arch
        assert loaded.evidence
        for kernel in (*DECODER_KERNELS, WIDE):
            loaded.row(kernel, 64)
            assert loaded.schedule(kernel, 64) == ("tile" if arch == "sm90" else "race")


def test_the_search_for_overwritten_operands_finds_one():
    """A wgmma whose operand A comes from outside the loop, in registers that the loop then writes (a bug of ptxas)."""
    loop = [
        "/*0100*/ HGMMA.64x64x16.F32.BF16 R24, R4, gdesc[UR8], R24 ;",
        "/*0110*/ F2FP.BF16.F32.PACK_AB R5, R25, R24 ;",
    ]
    assert triton_compile.aliased_operands(loop) == [loop[0]]
    assert triton_compile.aliased_operands([loop[0], loop[1].replace("R5", "R9")]) == []
    reloaded = ["/*00f0*/ LDSM.16.M88.4 R4, [R80] ;", *loop]
    assert triton_compile.aliased_operands(reloaded) == []
