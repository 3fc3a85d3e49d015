"""Parts of bench_e2e.py: is a first request right, the rows of the JSON, and the table.

A row: `variant` (as on the command line), `runner` (ours, stock, xfuser), `options`, `chosen` (attentions and decode,
in that runner's words), `work`, `build_seconds`, `compile_seconds`, `first_request_seconds`, and either `error` or
`median_seconds`, `min_seconds`, `max_seconds` (prompt to frames on the host), `runs`, `stages` (each with the same
three; mux beside the total), `to_file_seconds` (wall clock of each request that wrote one), `peak_gib`,
`peak_gib_per_rank`.
"""

import statistics
from typing import Any

import torch
from e2e_variants import Variant, Verified

from runner.config import RunConfig
from runner.metrics import summarise
from runner_models.api import VideoRequest
from runner_models.ltx2.recipes import DISTILLED_SIGMAS, STAGE_2_SIGMAS, token_counts

GIB = 2**30
SAME_LATENTS = 0.5
"""Relative L2 of final latents. Another kernel in bf16 is at 1e-2 to 1e-1, another seed at 1.4."""


def check_result(
    verified: Verified, request: VideoRequest, config: RunConfig, *, first: Verified | None, leads: bool
) -> tuple[dict[str, Any], str | None]:
    """(what was found, what is wrong or None) of a variant's first request; `first` is the reference, None if it is."""
    work = verified.work
    found: dict[str, Any] = {"transformer_video_tokens": work.video_tokens}
    wrong = None
    if config.recipe.distilled:
        sizes = {"height": request.height, "width": request.width}
        counts = token_counts(config.recipe, **sizes, num_frames=request.num_frames, frame_rate=request.frame_rate)
        steps = (len(DISTILLED_SIGMAS), len(STAGE_2_SIGMAS))
        want = [count.video for count, calls in zip(counts, steps, strict=True) for _ in range(calls)]
        if work.video_tokens != want:
            wrong = f"the transformer's calls had {work.video_tokens} video tokens and not {want}"
    if work.latents is not None and not bool(torch.isfinite(work.latents).all()):
        wrong = wrong or "its final latents are not finite"
    elif first is not None and first.work.latents is not None and work.latents is not None:
        expected = first.work.latents.float()
        difference = work.latents.to(expected.device).float() - expected
        error = found["latents_relative_l2"] = float(difference.norm() / expected.norm())
        if not error <= SAME_LATENTS:
            wrong = wrong or f"its final latents are others: relative L2 {error:.1e}"
    if leads:
        wrong = wrong or _wrong_output(verified, request)
    return found, wrong


def _wrong_output(verified: Verified, request: VideoRequest) -> str | None:
    frames, audio = verified.frames, verified.audio
    if frames is None or audio is None:
        return "no frames came to the first rank"
    if tuple(frames.shape) != (request.num_frames, request.height, request.width, 3):
        return f"frames have the shape {tuple(frames.shape)}"
    if frames.dtype != torch.uint8 or int(frames.max()) == int(frames.min()):
        return "the frames are a constant"
    if not audio.numel() or not bool(torch.isfinite(audio).all()):
        return "the sound is empty or not finite"
    return None


def rows(variants: list[Variant]) -> list[dict[str, Any]]:
    """JSON types only."""
    return [_row(variant) for variant in variants if variant.row]


def _row(variant: Variant) -> dict[str, Any]:
    row = {"variant": variant.spec, "runner": variant.name, "options": variant.options, **variant.row}
    if not variant.samples:
        return row
    totals = [sample.total_seconds for sample in variant.samples]
    stages = summarise(variant.samples)
    del stages["total"]
    peaks = [max(ranks) for ranks in zip(*(sample.peak_memory_bytes for sample in variant.samples), strict=True)]
    return row | {
        "median_seconds": statistics.median(totals),
        "min_seconds": min(totals),
        "max_seconds": max(totals),
        "runs": len(totals),
        "stages": stages,
        "to_file_seconds": variant.to_file_seconds,
        "peak_gib": max(peaks) / GIB,
        "peak_gib_per_rank": [peak / GIB for peak in peaks],
    }


def table(result: dict[str, Any]) -> str:
    """For people."""
    config = result["config"]
    names = list(dict.fromkeys(name for row in result["rows"] for name in row.get("stages", {})))
    wide = max((len(row["variant"]) for row in result["rows"]), default=8)
    lines = [
        f"{result['device']}, {result['ranks']} rank(s), {result['dtype']}, {config['task']} {config['width']}x"
        f"{config['height']}x{config['num_frames']}; weights {result['weights_gib']:.1f} GiB in "
        f"{result['load_seconds']:.1f} s; medians, seconds",
        f"{'variant':<{wide}} {'frames':>8} {'min':>8} {'max':>8} {'file':>8} {'GiB':>6}  "
        + " ".join(f"{name:>12}" for name in names),
    ]
    for row in result["rows"]:
        if "median_seconds" not in row:
            lines.append(f"{row['variant']:<{wide}} {row.get('error', 'not timed')}")
            continue
        to_file = f"{statistics.median(row['to_file_seconds']):>8.2f}" if row["to_file_seconds"] else f"{'-':>8}"
        stages = (row["stages"].get(name) for name in names)
        lines.append(
            f"{row['variant']:<{wide}} {row['median_seconds']:>8.2f} {row['min_seconds']:>8.2f} "
            f"{row['max_seconds']:>8.2f} {to_file} {row['peak_gib']:>6.1f}  "
            + " ".join(f"{stage['median_seconds']:>12.3f}" if stage else f"{'-':>12}" for stage in stages)
        )
    return "\n".join(lines)
