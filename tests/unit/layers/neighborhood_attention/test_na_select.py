"""Which attention is taken: the order, the lines of the log, one choice on all ranks, the fastest."""

import sys

import pytest
import torch
from stand_ins import choose, lines, target, with_aiter, with_natten

from layers.neighborhood_attention import builtin, select
from layers.neighborhood_attention.aiter import make_aiter
from layers.neighborhood_attention.backend import Backend
from layers.neighborhood_attention.fastest import Grid, choose_fastest
from layers.neighborhood_attention.select import CHOICES, report_calls, select_attention

pytestmark = pytest.mark.usefixtures("nothing_installed")

CPU_LINES = [
    "decoder attention: natten refused: needs an NVIDIA GPU, sm80 or newer; this is a CPU",
    "decoder attention: aiter refused: needs gfx942 or gfx950 (MI300X, MI350X); this is a CPU",
    "decoder attention: triton refused: needs NVIDIA sm80 or newer, or gfx942 or gfx950; this is a CPU",
    "decoder attention: using sdpa (cpu)",
]


def test_a_cpu_takes_sdpa_and_says_why(caplog: pytest.LogCaptureFixture) -> None:
    selection = choose(caplog, "auto", "cpu", torch.float32)
    assert lines(caplog) == CPU_LINES
    assert selection.describe() == {
        "requested": "auto",
        "used": "sdpa",
        "detail": "cpu",
        "refused": {line.split()[2]: line.split("refused: ")[1] for line in CPU_LINES[:3]},
        "measured_milliseconds": {},
        "calls": 0,
        "routed_calls": {},
    }


def test_the_lines_of_an_h200(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, triton_works: None
) -> None:
    with_aiter(monkeypatch, function=None)
    monkeypatch.setattr(builtin, "choose_config", lambda device, *rest: select_config("sm90", *rest))
    choose(caplog, "auto", "sm90", torch.bfloat16, ((3, 7, 7), (11, 11, 11)))
    assert lines(caplog) == [
        "decoder attention: natten refused: not installed (pip install natten, or see docs/backends.md)",
        "decoder attention: aiter refused: AITER 0.1.7 has no na3d_flash (needs a build with ROCm/aiter#5230)",
        "decoder attention: using triton (sm90, schedule tile)",
    ]


def select_config(arch: str, kernel, head_dim: int, dtype: torch.dtype):
    from layers.neighborhood_attention import configs

    config = configs.load(arch)
    return getattr(config, config.schedule(kernel, head_dim))(kernel, head_dim)


def test_the_order_is_natten_aiter_triton_sdpa(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, triton_works: None
) -> None:
    assert CHOICES == ("auto", "fastest", "natten", "aiter", "triton", "sdpa")
    with_natten(monkeypatch)
    assert choose(caplog).describe()["used"] == "natten"
    assert lines(caplog) == [
        "decoder attention: using natten (sm90, NATTEN 0.21.7)",
        "decoder attention: triton is 3 to 7 times faster than natten on an H200 (docs/backends.md): "
        "--decoder_attention triton, or fastest",
    ]
    with_aiter(monkeypatch)
    assert choose(caplog, "auto", "gfx950").describe()["used"] == "aiter"
    assert lines(caplog)[-1] == "decoder attention: using aiter (gfx950, AITER 0.1.7)"
    assert choose(caplog, "auto", "gfx942").describe()["used"] == "aiter"
    assert choose(caplog, "auto", "gfx942", torch.float16).describe()["used"] == "triton"
    assert choose(caplog, "auto", "gfx90a").describe()["used"] == "sdpa"
    assert choose(caplog, "auto", "sm80", torch.float32).describe()["used"] == "natten"


def test_a_named_one_is_taken_without_asking_the_others(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(select.MAKERS, "natten", lambda target: pytest.fail("asked natten"))
    assert choose(caplog, "sdpa").refused == {}
    assert lines(caplog) == ["decoder attention: using sdpa (sm90)"]
    with pytest.raises(ValueError, match="flex is not an attention of the decoder; there are natten, aiter,"):
        select_attention("flex", target())


@pytest.mark.parametrize("requested", ["auto", "natten"])
def test_one_rank_that_cannot_decides_for_all(
    requested: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, triton_works: None
) -> None:
    with_natten(monkeypatch)
    theirs = iter(["not installed", None, None, None])
    options = {"everywhere": lambda reason: [reason, next(theirs) if reason is None else reason]}
    if requested == "natten":
        with pytest.raises(ValueError, match="cannot be used here: on rank 1: not installed"):
            choose(caplog, requested, **options)
        return
    selection = choose(caplog, requested, **options)
    assert selection.refused["natten"] == "on rank 1: not installed"
    assert "decoder attention: natten refused: on rank 1: not installed" in lines(caplog)
    assert selection.describe()["used"] == "triton"


def slow(seconds: float):
    def attend(q, k, v, kernel_size):
        import time

        time.sleep(seconds * (1 if kernel_size == (3, 5, 5) else 0.01))
        return builtin.neighborhood_attention_sdpa(q, k, v, kernel_size)

    return attend


def test_fastest_measures_and_takes_the_best_of_each_kernel_size(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels = ((3, 5, 5), (5, 3, 3))
    monkeypatch.setattr(
        select,
        "MAKERS",
        {
            "natten": lambda _: Backend("natten", slow(0.05), takes_offsets=False),
            "aiter": make_aiter,
            "sdpa": lambda _: Backend("sdpa", lambda *a, **k: slow(0.02)(*a), takes_offsets=True),
        },
    )
    monkeypatch.setattr(select, "make_sdpa", select.MAKERS["sdpa"])
    selection = choose(caplog, "fastest", "sm90", torch.bfloat16, kernels)
    assert "decoder attention: using the fastest of natten, sdpa (sm90), measured before the first video" in lines(
        caplog
    )
    grids = [Grid((3, 5, 5), (4, 6, 6), 2, 3), Grid((5, 3, 3), (6, 4, 4), 1, 1)]
    heard = []

    def everywhere(times):
        """A second rank on which natten is slow for the other kernel size too."""
        heard.append(times)
        return [times, [[1.0, 2.0], [9e9, 2.0]]]

    table = choose_fastest(selection, grids, everywhere=everywhere)
    assert len(heard) == 1
    assert table["(3, 5, 5)"]["natten"] > 3 * 40 > table["(3, 5, 5)"]["sdpa"] > 3 * 15
    assert table["(5, 3, 3)"]["natten"] == 9e9
    assert selection.describe()["used"] == "sdpa"
    assert selection.describe()["measured_milliseconds"] == table
    shown = ", ".join(f"{name} {ms:.3f} ms" for name, ms in table["(3, 5, 5)"].items())
    assert f"decoder attention: using sdpa for (3, 5, 5) ({shown}, a video's blocks)" in lines(caplog)
    q = torch.randn(1, 4, 6, 6, 1, 16)
    selection.attention.prefer((3, 5, 5), selection.attention.backends[0])
    assert selection.describe()["used"] == {"(3, 5, 5)": "natten", "(5, 3, 3)": "sdpa"}
    assert selection.attention(q, q, q, (3, 5, 5)).shape == q.shape


def test_fastest_with_nothing_to_choose_from(caplog: pytest.LogCaptureFixture) -> None:
    selection = choose(caplog, "fastest", "cpu", torch.float32)
    assert lines(caplog) == CPU_LINES
    assert choose_fastest(selection, [Grid((3, 5, 5), (4, 6, 6), 1, 1)], everywhere=pytest.fail) == {}


def test_routed_calls_are_told_once_for_all_ranks(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_aiter(monkeypatch)
    selection = choose(caplog, "aiter", "gfx942")
    q = torch.randn(1, 3, 5, 8, 1, 16).bfloat16()
    for _ in range(2):
        selection.attention(q, q, q, (3, 5, 5))
    caplog.clear()
    report_calls(selection, everywhere=lambda value: [value, value])
    assert lines(caplog) == ["decoder attention: 4 of 4 calls went to sdpa instead: aiter: narrower than 16 (4)"]
    assert selection.describe()["routed_calls"] == {"aiter: narrower than 16": 4}
    assert selection.describe()["calls"] == 4


def test_the_machine_is_left_as_it_was() -> None:
    assert not {"natten", "aiter", "kernels", "hub_natten"} & set(sys.modules)
