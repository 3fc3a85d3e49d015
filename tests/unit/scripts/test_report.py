"""report.py on the committed results, and on results made here whose figures are known."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import report
from report_read import load_results

ROOT = Path(__file__).parents[3]
SOURCE = {
    "device": "NVIDIA H200",
    "versions": {"torch": "2.11.0", "hip": None, "xfuser": "0.7.0"},
    "commit": "0123456789ab",
    "command": ["python", "scripts/bench.py", "--prompt", "a cat"],
    "date": "2026-12-24T10:00:00+0000",
}


def _times(median: float, **more: Any) -> dict[str, Any]:
    return {"median_seconds": median, "min_seconds": median * 0.9, "max_seconds": median * 1.2, **more}


def _e2e(ranks: int = 1) -> dict[str, Any]:
    config = {"task": "i2v", "model": "LTX-2.5", "num_inference_steps": 8}
    config |= {"width": 1536, "height": 1024, "num_frames": 121}

    def row(runner: str, total: float) -> dict[str, Any]:
        stages = {"video_decode": _times(total / 2), "stage1": _times(total / 4), "encode": _times(total / 4)}
        done = {"runs": 3, "stages": stages, "to_file_seconds": [total + 1], "peak_gib_per_rank": [70.0] * ranks}
        chosen = {"video_decode": {"method": "exact"}, "decoder_attention": {"used": "triton"}}
        return {"variant": runner, "runner": runner, "chosen": chosen, "work": {}} | _times(total / ranks) | done

    failed = {"variant": "stock", "runner": "stock", "error": "OutOfMemoryError: 80 GiB"}
    rows = [row("ours", 8.0), row("xfuser", 20.0), failed]
    return {**SOURCE, "benchmark": "e2e", "config": config, "random_weights": False, "ranks": ranks, "rows": rows}


def _decode() -> dict[str, Any]:
    rows = [
        {"variant": "stock tiled, sdpa", "relative_l2": 1.07, "peak_gib": 19.0, "runs": 1, **_times(16.0)},
        {"variant": "exact", "relative_l2": 0.0, "peak_gib": 40.0, "runs": 2, **_times(2.5)},
        {"variant": "exact, chunks of 8", "error": "wrong: relative L2 1.0e-01; not timed"},
    ]
    stage = {"stage": "stage 5", "bytes": 2e12, "flops": 3e14, "floor_ms": 600.0, "measured_ms": 900.0}
    return {
        **SOURCE,
        "dtype": "bfloat16",
        "latents": [1, 128, 16, 48, 32],
        "ranks": 1,
        "rows": rows,
        "milliseconds_by_stage": {"whole": {"stage 5": 900.0, "start": 100.0}},
        "one_rank_of": [{"ranks": 2, "median_seconds": 1.3, "peak_gib": 22.0, "halo_gb_received": 1.5}],
        "roofline": [stage],
    }


def _fused() -> dict[str, Any]:
    """A copy that runs at half the copy rate, a product at a quarter of the matrix rate, and an op that is wrong."""
    times = {"runs": 5, "relative_l2": 1e-3}
    copy = {"op": "norm", "shape": "8x8", "median_ms": 2.0, "min_ms": 2.0, "max_ms": 2.0, "gigabytes": 4.0}
    product = {"op": "mlp", "shape": "8x8", "median_ms": 4.0, "min_ms": 4.0, "max_ms": 4.0, "gigabytes": 1.0}
    copy |= {"teraflops": 0.0, "bytes_ms": 1.0, "flops_ms": 0.0, **times}
    product |= {"teraflops": 0.8, "bytes_ms": 0.25, "flops_ms": 1.0, **times}
    wrong = {"op": "qkv", "shape": "8x8", "error": "relative L2 1.0e-01"}
    rates = {"copy_bytes_per_s": 4e12, "flops_per_s": 8e14}
    return {**SOURCE, "ceilings": rates, "rows": [copy, product, wrong]}


def _run(folder: Path, capsys: pytest.CaptureFixture[str], **files: Any) -> tuple[str, str, dict[str, Any], str]:
    """HTML, Markdown, the last line, stderr."""
    results = folder / "benchmarks"
    results.mkdir()
    for name, data in files.items():
        (results / f"{name}.json").write_text(data if isinstance(data, str) else json.dumps(data))
    assert report.main(["--benchmarks", str(results)]) == 0
    out, err = capsys.readouterr()
    page, markdown = (results / "report.html").read_text(), (results / "REPORT.md").read_text()
    return page, markdown, json.loads(out.splitlines()[-1]), err


class _Balance(HTMLParser):
    """Every tag is closed in turn, ids are not given twice, nothing is fetched."""

    VOID = frozenset({"meta", "br", "hr", "img"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.fetched: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in self.VOID:
            self.open.append(tag)
        given = dict(attrs)
        self.ids += [given["id"] or ""] if "id" in given else []
        links = [given.get(name) or "" for name in ("src", "href", "xlink:href")]
        self.fetched += [link for link in links if link and not link.startswith("#")]
        assert tag not in ("script", "link", "iframe")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def _check_page(page: str) -> None:
    parser = _Balance()
    parser.feed(page)
    assert parser.open == []
    assert len(parser.ids) == len(set(parser.ids))
    assert parser.fetched == []
    assert "@import" not in page
    targets = set(re.findall(r'href="#([^"]+)"', page)) | set(re.findall(r"url\(#([^)]+)\)", page))
    assert targets <= set(parser.ids)


def test_the_committed_report_is_that_of_the_committed_results(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    where = {"html": tmp_path / "report.html", "markdown": tmp_path / "REPORT.md", "plots": tmp_path / "plots"}
    flags = [text for name, path in where.items() for text in (f"--{name}", str(path))]
    assert report.main(["--benchmarks", str(ROOT / "benchmarks"), *flags]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    files = {path.name for path in (ROOT / "benchmarks").glob("*.json")}
    assert set(result["read"]) | set(result["skipped"]) == files
    _check_page(where["html"].read_text())
    committed = ROOT / "benchmarks" / "REPORT.md"
    new, old = (re.sub(r"\(.*/(report_\w+\.svg)\)", r"(\1)", p.read_text()) for p in (where["markdown"], committed))
    assert new == old, "run: python scripts/report.py"
    assert {path.name for path in where["plots"].iterdir()} == {
        path.name for path in (ROOT / "docs" / "assets").glob("report_*.svg")
    }


def test_figures_and_ratios(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page, markdown, result, err = _run(tmp_path, capsys, e2e=_e2e(), e2e_2=_e2e(2), decode=_decode(), fused=_fused())
    _check_page(page)
    assert err == ""
    assert result["skipped"] == {}
    glance = markdown.split("## ")[1]
    assert "| ours: 8.00 s | xfuser: 20.0 s | 2.50x | [2] |" in glance
    assert "| whole request against stock | not measured | not measured | not measured |  |" in glance
    assert "| exact: 2.50 s | stock tiled, sdpa: 16.0 s | 6.40x | [1] |" in glance
    assert "| ours | 1 rank | 8.00 (7.20 to 9.60), 3 runs |  | 9.00, 1 run | 70.0 | exact, triton | [2] |" in markdown
    assert "| xfuser | 2 ranks | 10.0 (9.00 to 12.0), 3 runs | 2.50x |" in markdown
    assert "| stock | 1 rank | OutOfMemoryError: 80 GiB | not measured |" in markdown
    assert "| exact, chunks of 8 | wrong: relative L2 1.0e-01; not timed | not measured |" in markdown
    assert "| norm | 8x8 | 2.00, 5 runs | 4.00 | 0 | 1.00 | 2.00x | 1.0e-03 |" in markdown
    assert "| mlp | 8x8 | 4.00, 5 runs | 1.00 | 0.800 | 1.00 | 4.00x | 1.0e-03 |" in markdown
    assert "| qkv | 8x8 | relative L2 1.0e-01 | not measured |" in markdown
    assert "| stage 5 | 2,000 | 300.0 | 150.0 | 600.0 | 900.0 | 1.50x |" in markdown
    assert (
        "| request i2v distilled 1536x1024x121, 8 steps, ours, NVIDIA H200 | 8.00 s | 4.00 s | not measured |"
        in markdown
    )
    assert "NVIDIA H200: model | 2.50 s | 1.30 s | not measured | not measured |" in markdown
    assert "| NVIDIA H200 | 2 ranks | 4.00 s | not measured | not measured | - |" in markdown
    assert "| AMD Instinct MI350X | 8 ranks | not measured | not measured | not measured | - |" in markdown


def test_a_run_of_the_runner(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """metrics.json: only the last of two iterations wrote a file, so that its mux is one run."""
    config = _e2e()["config"] | {"use_torch_compile": True, "task": "t2v"}
    iterations = [{"stage1_seconds": s, "peak_memory_bytes_per_rank": [2**30 * s, 2**30]} for s in (3, 2)]
    iterations[1]["mux_seconds"] = 0.5
    summary = {"stage1": _times(2.5), "total": _times(2.5), "mux": _times(0.5)}
    metrics = {**SOURCE, "config": config, "iterations": iterations, "summary": summary, "world_size": 2}
    _, markdown, *_ = _run(tmp_path, capsys, metrics=metrics | {"model": {"recipe": "full", "random_weights": True}})
    row = (
        "| ours, compiled | 2 ranks | 2.50 (2.25 to 3.00), 2 runs |  | 0.500 (0.450 to 0.600), 1 run after the total |"
    )
    assert f"{row} 3.0, 1.0 | method not recorded, attention not recorded | [1] |" in markdown
    assert "**t2v full 1536x1024x121, 8 steps, random weights**" in markdown


def test_every_figure_has_its_source(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page, markdown, *_ = _run(tmp_path, capsys, decode=_decode())
    words = "NVIDIA H200; torch 2.11.0, xfuser 0.7.0; commit 0123456789ab; 2026-12-24; "
    without_figures = 6  # the tables of places and sources, and of the four kinds that are missing
    assert page.count(words) == page.count("<figcaption") + page.count("<tbody") - without_figures
    assert f"{words}`python scripts/bench.py --prompt 'a cat'`" in markdown


def test_nothing_is_skipped_in_silence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    anonymous = {name: value for name, value in _decode().items() if name not in ("device", "date")}
    malformed = _decode()
    del malformed["rows"][0]["variant"]
    bad_roofline = _decode() | {"roofline": [{"stage": "stage 5"}]}
    words, nan, zero = _e2e(), _e2e(), _decode()
    words["rows"][0]["median_seconds"] = "five"
    nan["rows"][0]["peak_gib_per_rank"] = [float("nan")]
    zero["rows"][0]["median_seconds"] = 0
    page, markdown, result, err = _run(
        tmp_path, capsys,
        broken="{", other={"hello": 1}, numbers=[1], anonymous=anonymous, malformed=malformed, roof=bad_roofline,
        deep="[" * 100_000, records={"records": [3]}, versions=_decode() | {"versions": ["torch"]},
        words=words, nan=nan, zero=zero,
    )  # fmt: skip
    expected = {
        "broken.json": "not readable as json",
        "other.json": "it holds hello, without device, command, date",
        "numbers.json": "it holds a list",
        "anonymous.json": "records no device, no date",
        "malformed.json": "looks like a decode result but is malformed: KeyError('variant')",
        "deep.json": "not readable as json",
        "records.json": "it holds records, without device, command, date",
        "versions.json": "looks like a decode result but is malformed",
        "words.json": "median is 'five' and not a finite number",
        "nan.json": "peaks is nan and not a finite number",
        "zero.json": "time is 0 and not above 0",
        "roof.json": "its roofline is malformed (KeyError('floor_ms')); the rest is shown",
    }
    assert result["skipped"].keys() == expected.keys()
    for name, words in expected.items():
        assert words in result["skipped"][name]
        assert f"skipped {name}: " in err
        assert name in page.split("Skipped files</h2>")[1]
        assert name in markdown.split("## Skipped files")[1]
    assert result["read"] == ["roof.json"]


def test_no_results_at_all(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page, markdown, result, _ = _run(tmp_path, capsys)
    _check_page(page)
    assert result["plots"] == []
    assert "| xfuser | not measured |" in markdown
    assert not re.search(r"\d+(\.\d+)? (s|ms|TFLOP/s) \|", markdown), "no figure comes from nowhere"


def test_the_same_files_give_the_same_bytes_and_old_plots_go(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page, *_ = _run(tmp_path, capsys, decode=_decode(), e2e=_e2e())
    plots = tmp_path / "docs" / "assets"
    before = {path.name: path.read_bytes() for path in plots.iterdir()}
    (plots / "report_old.svg").write_text("")
    (plots / "picture.svg").write_text("kept")
    assert report.main(["--benchmarks", str(tmp_path / "benchmarks")]) == 0
    assert (tmp_path / "benchmarks" / "report.html").read_text() == page
    assert {path.name: path.read_bytes() for path in plots.iterdir()} == before | {"picture.svg": b"kept"}


def test_a_folder_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert report.main(["--benchmarks", str(tmp_path / "nowhere")]) == 2
    assert "nowhere is not a folder" in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--html", "--markdown", "--plots"])
def test_a_place_that_cannot_be_written(flag: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "e2e.json").write_text(json.dumps(_e2e()))
    places = {name: str(tmp_path / "out" / name[2:]) for name in ("--html", "--markdown", "--plots")}
    places[flag] = str(tmp_path / "file" / "x")
    assert report.main(["--benchmarks", str(tmp_path), *(word for pair in places.items() for word in pair)]) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith(f"{flag}: {tmp_path}/file")
    assert not printed.out


def test_text_of_a_json_is_not_markup(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    nasty = _decode() | {"device": "<script>x</script>|"}
    page, markdown, *_ = _run(tmp_path, capsys, decode=nasty)
    _check_page(page)
    assert "&lt;script>x&lt;/script>\\|" in markdown
    assert load_results(tmp_path / "benchmarks").sources[0].device == nasty["device"]
