"""Values of the bench scripts' flags, refused before anything is measured."""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import bench_decode
import bench_e2e
import bench_transformer
import pytest
import torch
from arguments import at_least, number, output_file, seconds


@pytest.mark.parametrize(
    ("read", "text", "part"),
    [
        (at_least(1), "0", "0 is not an integer of 1 or more"),
        (at_least(1), "2.5", "2.5 is not an integer of 1 or more"),
        (at_least(8, multiple_of=8), "12", "12 is not an integer of 8 or more, a multiple of 8"),
        (number, "nan", "nan is not a finite number"),
        (number, "inf", "inf is not a finite number"),
        (number, "ten", "ten is not a finite number"),
        (seconds, "0", "0 is not above 0"),
        (seconds, "-5", "-5 is not above 0"),
    ],
)
def test_what_is_refused(read: Callable[[str], Any], text: str, part: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError) as refused:
        read(text)
    assert str(refused.value) == part


def test_what_is_taken(tmp_path: Path) -> None:
    assert (at_least(8, multiple_of=8)("16"), number("-1"), seconds("1e2")) == (16, -1.0, 100.0)
    assert output_file(str(tmp_path / "new" / "a.json")) == tmp_path / "new" / "a.json"
    assert not list((tmp_path / "new").iterdir()), "nothing is left of the try"


def test_an_output_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path, part in (
        (tmp_path, "is a folder; give a file"),
        (tmp_path / "file" / "a.json", "it is a file"),
        (Path("/proc/none/a.json"), "No such file"),
    ):
        with pytest.raises(argparse.ArgumentTypeError, match=part):
            output_file(str(path))


@pytest.mark.parametrize("parse", [bench_e2e.parse, bench_decode.parse], ids=["e2e", "decode"])
@pytest.mark.parametrize(
    "flags", [["--seconds", "nan"], ["--seconds", "-1"], ["--out", "/proc/none/a.json"]], ids=" ".join
)
def test_the_scripts_use_them(
    parse: Callable[[list[str]], Any], flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(flags)
    assert ended.value.code == 2
    assert f"argument {flags[0]}: {flags[1]} " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "part"),
    [
        (["--rounds", "0"], "argument --rounds: 0 is not an integer of 1 or more"),
        (["--chunks", "7"], "argument --chunks: 7 is not an integer of 8 or more, a multiple of 8"),
        (["--latents", "-3", "8", "8"], "argument --latents: -3 is not an integer of 1 or more"),
        (["--latents", "1", "8", "8"], "--latents 1 8 8: latents of 1x8x8 cells give stage 5 a grid of 1x64x64"),
        (["--device", "tpu"], "argument --device: invalid choice: 'tpu' (choose from"),
        (["--device", "cuda"], "--device cuda: torch sees no GPU here"),
    ],
)
def test_a_decode_that_cannot_be(
    flags: list[str], part: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(SystemExit) as ended:
        bench_decode.parse(["--tiny", *flags])
    assert ended.value.code == 2
    assert part in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a GPU")
@pytest.mark.parametrize(
    ("parse", "small"),
    [(bench_decode.parse, ["--tiny"]), (bench_transformer.parse, ["--num_layers", "1"])],
    ids=["decode", "transformer"],
)
def test_the_released_size_on_a_cpu_only_if_asked(parse, small, capsys) -> None:
    with pytest.raises(SystemExit):
        parse([])
    assert "torch sees no GPU, and a CPU needs hours for the released size: give " + small[0] in capsys.readouterr().err
    with pytest.raises(SystemExit):
        parse([*small, "--device", "cuda"])
    assert "--device cuda: torch sees no GPU here" in capsys.readouterr().err
    assert parse(small).device == parse(["--device", "cpu"]).device == "cpu"
