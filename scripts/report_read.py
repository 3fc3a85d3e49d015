"""What report.py reads: every json of a folder as one of six kinds of result, or a line that says why it was skipped.

A result is kept only with its source: device, versions, command, date and, where the tree was a git checkout, commit.
"""

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

from report_data import (
    NOT_RECORDED,
    DecodeResult,
    FusedResult,
    KernelRow,
    OpRow,
    Results,
    RooflineRow,
    Row,
    Source,
    Spread,
    TransformerRow,
    check_types,
)

GIB = 2**30


def load_results(folder: Path) -> Results:
    """Read `folder`/*.json in the order of their names. Nothing is left out silently: see Results.skipped."""
    results = Results()
    for path in sorted(folder.glob("*.json")):
        try:
            data = json.loads(path.read_text())
        except (OSError, ValueError, RecursionError) as error:
            results.skipped.append((path.name, f"not readable as json: {error}"))
            continue
        kind = kind_of(data)
        if kind is None:
            results.skipped.append((path.name, f"not a result that this report knows; {_describe(data)}"))
            continue
        missing = [name for name in ("device", "command", "date") if not data.get(name)]
        if missing:
            results.skipped.append((path.name, f"records no {', no '.join(missing)}: its figures cannot be attributed"))
            continue
        fresh = Results()
        try:
            source = _source(path.name, data, len(results.sources) + 1)
            kind(data, source, fresh)
            check_types(source, Source)
            check_types(fresh, Results)
        except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
            what = kind.__name__.removeprefix("_read_")
            results.skipped.append((path.name, f"looks like a {what} result but is malformed: {error!r}"))
            continue
        results.sources.append(source)
        for name in ("requests", "decodes", "transformers", "kernels", "fused", "skipped"):
            getattr(results, name).extend(getattr(fresh, name))
    return results


def _describe(data: Any) -> str:
    """What a json holds instead, in a few words."""
    if not isinstance(data, dict):
        return f"it holds a {type(data).__name__}"
    missing = [name for name in ("device", "command", "date") if name not in data]
    without = f", without {', '.join(missing)}" if missing else ""
    return f"it holds {', '.join(list(map(str, data))[:4]) or 'nothing'}{without}"


def kind_of(data: Any) -> Callable[[dict[str, Any], Source, Results], None] | None:
    """The reader of a json; None for a kind that is not known."""
    if not isinstance(data, dict):
        return None
    rows = data.get("rows")
    first = rows[0] if isinstance(rows, list) and rows and isinstance(rows[0], dict) else {}
    if data.get("benchmark") == "e2e":
        return _read_e2e
    if {"config", "iterations", "summary"} <= set(data):
        return _read_metrics
    if "latents" in data and isinstance(rows, list):
        return _read_decode
    if "ceilings" in data and "op" in first:
        return _read_fused
    if "video_tokens" in first:
        return _read_transformer
    records = data.get("records")
    if isinstance(records, list) and records and isinstance(records[0], dict) and "grid" in records[0]:
        return _read_kernel
    return None


def _source(file: str, data: dict[str, Any], number: int) -> Source:
    versions = data.get("versions") or {name: data[name] for name in ("torch", "triton") if name in data}
    command = data["command"]
    return Source(
        number,
        file,
        str(data["device"]),
        tuple((name, str(value)) for name, value in versions.items() if value is not None),
        # the metrics.json of some runs have "python -m runner" as a single word
        " ".join(word if " -m " in word else shlex.quote(word) for word in command)
        if isinstance(command, list)
        else str(command),
        data.get("commit") or NOT_RECORDED,
        str(data["date"])[:10],
    )


def _seconds(row: dict[str, Any], runs: int = 0) -> Spread | None:
    if row.get("median_seconds") is None:
        return None
    median = row["median_seconds"]
    return Spread(median, row.get("min_seconds", median), row.get("max_seconds", median), row.get("runs", runs))


def _work(config: dict[str, Any], recipe: str, *, random_weights: bool) -> str:
    """What was made, and of which weights: figures of two of these are not compared."""
    size = f"{config['width']}x{config['height']}x{config['num_frames']}"
    tiny = "tiny " if str(config["model"]).startswith("tiny") else ""
    weights = ", random weights" if random_weights and not tiny else ""
    return f"{config['task']} {tiny}{recipe} {size}, {config['num_inference_steps']} steps{weights}"


def _read_e2e(data: dict[str, Any], source: Source, into: Results) -> None:
    config = data["config"]
    recipe = "full" if str(config["model"]).endswith("full") else "distilled"
    work = _work(config, recipe, random_weights=data["random_weights"])
    for row in data["rows"]:
        files = row.get("to_file_seconds") or []
        chosen = row.get("chosen") or {}
        into.requests.append(
            Row(
                source,
                row["variant"],
                int(data["ranks"]),
                work,
                _seconds(row),
                {name: spread for name, times in row.get("stages", {}).items() if (spread := _seconds(times))},
                tuple(row.get("peak_gib_per_rank") or ()),
                (row.get("work") or {}).get("latents_relative_l2"),
                row.get("runner", ""),
                _decode_words(chosen.get("video_decode"), chosen.get("decoder_attention")) if chosen else "",
                Spread(sorted(files)[len(files) // 2], min(files), max(files), len(files)) if files else None,
                row.get("error", ""),
            )
        )


def _read_metrics(data: dict[str, Any], source: Source, into: Results) -> None:
    config, model, summary = data["config"], data["model"], data["summary"]
    peaks: list[float] = []
    for sample in data["iterations"]:
        found = sample.get("peak_memory_bytes_per_rank") or [sample["peak_memory_bytes"]]
        peaks = [max(old, new / GIB) for old, new in zip(peaks or [0.0] * len(found), found, strict=True)]
    runs = len(data["iterations"])
    options = ["compiled"] if config["use_torch_compile"] else []
    options += ["offloaded to the host"] if config.get("enable_model_cpu_offload") else []
    into.requests.append(
        Row(
            source,
            ", ".join(["ours", *options]),
            int(data.get("world_size", 1)),
            _work(config, model["recipe"], random_weights=model["random_weights"]),
            _seconds(summary["total"], runs),
            {
                name: spread
                for name, times in summary.items()
                if name != "total"
                and (spread := _seconds(times, sum(f"{name}_seconds" in s for s in data["iterations"])))
            },
            tuple(peaks),
            runner="ours",
            decode=_decode_words(model.get("video_decode"), model.get("decoder_attention")),
        )
    )


def _decode_words(method: Any, attention: Any) -> str:
    """ "exact, triton"; a part that was not written down says so."""
    used = attention.get("used", attention) if isinstance(attention, dict) else attention
    how = method.get("method", method) if isinstance(method, dict) else method
    return f"{how or 'method ' + NOT_RECORDED}, {used or 'attention ' + NOT_RECORDED}"


def _read_decode(data: dict[str, Any], source: Source, into: Results) -> None:
    frames, height, width = 8 * data["latents"][2] - 7, 32 * data["latents"][3], 32 * data["latents"][4]
    work = f"{width}x{height}x{frames}, {data['dtype']}"
    rows = [
        Row(
            source,
            row["variant"],
            int(data["ranks"]),
            work,
            _seconds(row),
            peaks=(row["peak_gib"],) if row.get("peak_gib") else (),
            relative_l2=row.get("relative_l2"),
            error=row.get("error", ""),
        )
        for row in data["rows"]
    ]
    shares = [(s["ranks"], s["median_seconds"], s["peak_gib"]) for s in data.get("one_rank_of", [])]
    roofline: dict[str, list[RooflineRow]] = {}
    try:
        roofline = _roofline(data.get("roofline") or {})
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        into.skipped.append((source.file, f"its roofline is malformed ({error!r}); the rest is shown"))
    into.decodes.append(DecodeResult(source, work, rows, data.get("milliseconds_by_stage") or {}, shares, roofline))


def _roofline(found: Any) -> dict[str, list[RooflineRow]]:
    """A list of stages, or one for each way of decoding."""
    ways = {"": found} if isinstance(found, list) else found
    return {
        way: [
            RooflineRow(row["stage"], row.get("bytes"), row.get("flops"), row["floor_ms"], row.get("measured_ms"))
            for row in rows
        ]
        for way, rows in ways.items()
    }


def _read_transformer(data: dict[str, Any], source: Source, into: Results) -> None:
    ranks = data["ulysses_degree"] * data["ring_degree"]
    for row in data["rows"]:
        time = Spread(row["median_ms"], row["min_ms"], row["max_ms"])
        into.transformers.append(
            TransformerRow(
                source, row["stage"], row["variant"], ranks, row["video_tokens"], time, row.get("relative_l2")
            )
        )


def _read_fused(data: dict[str, Any], source: Source, into: Results) -> None:
    rows = []
    for row in data["rows"]:
        if row.get("error"):
            rows.append(OpRow(row["op"], row["shape"], None, error=row["error"]))
            continue
        time = Spread(row["median_ms"], row["min_ms"], row["max_ms"], row["runs"])
        size = (row["gigabytes"] * 1e9, row["teraflops"] * 1e12)
        rows.append(OpRow(row["op"], row["shape"], time, *size, row["bytes_ms"], row["flops_ms"], row["relative_l2"]))
    rates = data["ceilings"]
    into.fused.append(FusedResult(source, rates["copy_bytes_per_s"], rates["flops_per_s"], rows))


def _read_kernel(data: dict[str, Any], source: Source, into: Results) -> None:
    for row in data["records"]:
        variant, _, layout = row["variant"].partition("/")
        into.kernels.append(
            KernelRow(
                source,
                "x".join(map(str, row["grid"])),
                ",".join(map(str, row["kernel"])),
                variant,
                layout,
                Spread(row["ms"], *row["ms_min_max"]) if row["ms"] is not None else None,
                row.get("useful_tflops", 0.0),
                row.get("of_dense_cudnn", 0.0),
                row["relative_l2"],
            )
        )
