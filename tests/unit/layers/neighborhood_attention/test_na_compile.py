"""Every committed config compiles for its architecture to code that could be fast: facts from the machine code."""

import dataclasses
import math
from pathlib import Path

import na_compile
import pytest

from layers import neighborhood_attention
from layers.neighborhood_attention import configs
from layers.neighborhood_attention.configs import RowConfig

DECODER_KERNELS = ((11, 11, 11), (3, 7, 7), (3, 5, 5))
WIDE = (3, 5, 27)


def _cases():
    """(arch, schedule, kernel, head_dim): all that a json can choose; the decoder's largest stage is the fast part."""
    for arch in na_compile.TARGETS:
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
    assert fact["shared"] <= na_compile.SHARED_LIMIT[arch], fact
    assert fact["wide_loads"] > 0, fact
    assert fact["narrow_loads"] == 0, fact
    assert fact["alias"] == [], fact
    assert fact["matrix"], fact
    if getattr(config, "max_registers", 0):
        # A limit for one more program per multiprocessor: a few words of stack outside the loop over planes pay for it.
        assert fact["spills"][:1] in ([0], []), fact
        assert fact["stack_bytes"] <= 64, fact
    else:
        assert sum(fact["spills"]) == 0, fact
        assert fact["stack_bytes"] == 0, fact
    block = 2 * (math.prod(config.tile) if not isinstance(config, RowConfig) else config.block_q) * config.block_kv
    if isinstance(config, RowConfig):
        # The published configs give one 16-row block to 4 warps, which all repeat the scores on AMD (2.5x the work).
        least, most = block * 2 * head_dim, block * head_dim * (config.warps + 1)
        assert all(least <= flops <= most for flops in fact["flops_per_block"]), fact
    elif arch != "sm100":  # tcgen05 multiplies a whole block in one instruction of one thread: nothing to count
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
        "na3d_tile_4x4x4_kv64_k11x11x11_checked",
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
