#!/usr/bin/env python3
"""Compare two videos frame by frame, their sound, and whether the borders of tiles or shards show.

    python scripts/compare_videos.py A.mp4 B.mp4
    python scripts/compare_videos.py --against_reference    (renders both with tiny weights)

The second form compares the runner with the stock diffusers pipelines. Needs the report extra: pip install -e
".[report]". Writes worst_frame.png (A, B and their difference), seam_profile.png and comparison.json (every frame,
every line) to --output_directory. The last line of stdout is one JSON object.

Exit codes: 0, within all thresholds; 1, beyond one (said on stderr); 2, the videos cannot be compared (another size,
length, rate, sound in one alone, a damaged file), or the command line is wrong.
"""

import argparse
import json
import math
import re
import shlex
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
try:
    from compare_measures import STRIDE, TILE, Seams, audio_difference, psnr, ssim, tile_borders, worst_seam
    from compare_pictures import plot_seams, side_by_side
except ModuleNotFoundError as missing:
    print(f'{missing.name} is not installed: pip install -e ".[report]"', file=sys.stderr)
    raise SystemExit(2) from missing
from arguments import at_least, number
from compare_clips import Clip, NotComparable, check_audio_length, check_comparable, frame_pairs, open_clip
from compare_reference import RenderFailed, Request, render_runner, render_stock

NOT_FOR_THE_RUNNER = {
    f"__{name}"
    for name in (
        *("model", "task", "prompt", "dataset_path", "seed", "height", "width", "num_frames", "frame_rate"),
        *("input_images", "output_directory", "dry_run", "doctor", "json", "help", "version", "from_json", "config"),
    )
}
"""Flags, "-" as "_", that would make another video than the stock pipelines make, or none, or put it elsewhere."""


def parse(argv: list[str]) -> argparse.Namespace:
    """Flags with "-" and "_" alike."""
    argv = [re.sub(r"^--[^=]*", lambda flag: f"--{flag[0][2:].replace('-', '_')}", text) for text in argv]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("videos", nargs="*", type=Path, metavar="A B", help="two videos of one size and length")
    limits = parser.add_argument_group("thresholds (each frame must pass)")
    limits.add_argument("--min_psnr", type=number, default=40.0, metavar="DB", help="RGB (default: 40; 0 allows all)")
    limits.add_argument(
        "--min_ssim", type=number, default=0.98, metavar="S", help="luma (default: 0.98; -1 allows all)"
    )
    limits.add_argument(
        "--min_audio_snr", type=number, default=30.0, metavar="DB", help="sound of A to the difference (default: 30)"
    )
    limits.add_argument(
        "--max_seam",
        type=number,
        metavar="X",
        help="how many times a tile border may stand out; off unless given (1: not at all)",
    )
    parser.add_argument("--ignore_audio", action="store_true", help="compare the frames alone")
    parser.add_argument(
        "--tile", type=int, default=TILE, help=f"pixels of a tile (default: {TILE}, the stock decoder's)"
    )
    parser.add_argument("--stride", type=int, default=STRIDE, help=f"pixels between two tiles (default: {STRIDE})")
    parser.add_argument("--output_directory", type=Path, default=Path("results/compare"))
    both = parser.add_argument_group("--against_reference: A is stock diffusers', B the runner's")
    both.add_argument("--against_reference", action="store_true", help="render both with tiny weights on the CPU")
    both.add_argument("--prompt", default="a cat dancing at sunset")
    both.add_argument("--input_images", metavar="FILE", help="the first frame; makes the request i2v")
    both.add_argument("--height", type=int, default=256)
    both.add_argument("--width", type=int, default=256)
    both.add_argument("--num_frames", type=int, default=17)
    both.add_argument("--seed", type=int, default=42)
    both.add_argument("--ranks", type=at_least(1), default=1, help="processes of the runner, by torchrun (default: 1)")
    both.add_argument("--runner_flags", default="", help='more flags of the runner, e.g. "--decode_chunk_frames 8"')
    arguments = parser.parse_args(argv)
    if len(arguments.videos) != (0 if arguments.against_reference else 2):
        parser.error("give two videos, or --against_reference and none")
    if not 0 < arguments.stride < arguments.tile:
        parser.error(f"--stride {arguments.stride} must be positive and less than --tile {arguments.tile}")
    try:
        arguments.runner_flags = shlex.split(arguments.runner_flags)
    except ValueError as error:
        parser.error(f"--runner_flags {arguments.runner_flags} cannot be split into words: {error}")
    fixed = {flag.partition("=")[0].replace("-", "_") for flag in arguments.runner_flags} & NOT_FOR_THE_RUNNER
    if fixed:
        parser.error(f"--runner_flags cannot have {', '.join(sorted(fixed)).replace('__', '--')}: it is this script's")
    return arguments


def render(arguments: argparse.Namespace) -> list[Path]:
    """Both videos of --against_reference."""
    request = Request(
        prompt=arguments.prompt,
        height=arguments.height,
        width=arguments.width,
        num_frames=arguments.num_frames,
        seed=arguments.seed,
        image=arguments.input_images,
    )
    folder = arguments.output_directory
    print("rendering with the runner ...", file=sys.stderr)
    ours = render_runner(request, folder, ranks=arguments.ranks, flags=arguments.runner_flags)
    print("rendering with the stock pipelines ...", file=sys.stderr)
    return [render_stock(request, folder / "reference.mp4"), ours]


def compare(a: Clip, b: Clip, arguments: argparse.Namespace) -> dict[str, Any]:
    """All measures, and the two pictures. PSNR is None (json has no infinity) where frames are equal.

    Raises:
        NotComparable: see check_comparable, frame_pairs and check_audio_length.
    """
    check_comparable(a, b, ignore_audio=arguments.ignore_audio)
    frames: list[dict[str, float | None]] = []
    seams = {"rows": Seams(0), "columns": Seams(1)}
    worst, worst_pair = math.inf, None
    for one, other in frame_pairs(a, b):
        level = psnr(one, other)
        frames.append({"psnr_db": None if math.isinf(level) else level, "ssim": ssim(one, other)})
        if level < worst or worst_pair is None:
            worst, worst_pair, worst_frame = level, (one, other), len(frames) - 1
        for seam in seams.values():
            seam.add(one, other)
    if not arguments.ignore_audio:
        check_audio_length(a, b)
    overlap = arguments.tile - arguments.stride
    reports = {
        name: seam.report(tile_borders(length, tile=arguments.tile, stride=arguments.stride), overlap=overlap)
        for (name, seam), length in zip(seams.items(), (a.height, a.width), strict=True)
    }
    folder = arguments.output_directory
    assert worst_pair is not None
    words = f"frame {worst_frame}, PSNR {'infinite' if math.isinf(worst) else f'{worst:.1f} dB'}"
    side_by_side(*worst_pair, title=words).save(folder / "worst_frame.png")
    plot_seams(folder / "seam_profile.png", seams, reports, overlap=overlap)
    sound = None
    if not arguments.ignore_audio and a.audio_CN is not None and b.audio_CN is not None:
        sound = audio_difference(a.audio_CN, b.audio_CN)
    result = summary(a, b, frames, reports, sound) | {"worst_frame": worst_frame, "output_directory": str(folder)}
    lines = {name: (seam.difference / seam.frames).tolist() for name, seam in seams.items()}
    (folder / "comparison.json").write_text(json.dumps({**result, "frames": frames, "lines": lines}, indent=1) + "\n")
    return result


def summary(
    a: Clip, b: Clip, frames: list[dict[str, Any]], reports: dict[str, Any], sound: dict[str, Any] | None
) -> dict[str, Any]:
    """What the last line says."""
    levels = [frame["psnr_db"] for frame in frames if frame["psnr_db"] is not None]
    likeness = [frame["ssim"] for frame in frames]
    return {
        "a": str(a.path),
        "b": str(b.path),
        "size": [a.height, a.width],
        "num_frames": len(frames),
        "equal_frames": len(frames) - len(levels),
        "min_psnr_db": min(levels, default=None),
        "mean_psnr_db": sum(levels) / len(levels) if levels else None,
        "min_ssim": min(likeness),
        "mean_ssim": sum(likeness) / len(likeness),
        "audio": sound,
        "seams": reports,
        "worst_seam": worst_seam(reports),
    }


def failures(result: dict[str, Any], arguments: argparse.Namespace) -> list[str]:
    """One line for each threshold that is not met."""
    found = []
    level, audio = result["min_psnr_db"], result["audio"]
    if level is not None and level < arguments.min_psnr:
        found.append(f"PSNR {level:.2f} dB at frame {result['worst_frame']} is below --min_psnr {arguments.min_psnr:g}")
    if result["min_ssim"] < arguments.min_ssim:
        found.append(f"SSIM {result['min_ssim']:.4f} is below --min_ssim {arguments.min_ssim:g}")
    if audio is not None and not audio["equal"] and audio["snr_db"] < arguments.min_audio_snr:
        found.append(f"sound: {audio['snr_db']:.1f} dB is below --min_audio_snr {arguments.min_audio_snr:g}")
    seam = result["worst_seam"]
    if arguments.max_seam is not None and seam is not None and seam > arguments.max_seam:
        found.append(
            f"a tile border differs {seam:.2f} times from other lines, above --max_seam {arguments.max_seam:g}"
        )
    return found


def table(result: dict[str, Any]) -> str:
    """For people."""
    height, width = result["size"]
    lines = [f"{result['num_frames']} frames of {width}x{height}, {result['equal_frames']} of them equal"]
    if result["min_psnr_db"] is not None:
        low, mean = result["min_psnr_db"], result["mean_psnr_db"]
        lines.append(
            f"PSNR  {low:.2f} dB at frame {result['worst_frame']}, mean {mean:.2f} over the frames that differ"
        )
    lines.append(f"SSIM  {result['min_ssim']:.5f} at least, mean {result['mean_ssim']:.5f}")
    audio = result["audio"]
    if audio is None:
        lines.append("sound not compared")
    elif audio["equal"]:
        lines.append("sound equal")
    else:
        lines.append(f"sound {audio['snr_db']:.1f} dB, largest difference {audio['largest_difference']:.2e}")
    for name, report in result["seams"].items():
        step = report["largest_step"]
        lines.append(f"{name}: largest step at {step['at']}, {step['ratio']:.2f} times the median")
        for border in report["borders"]:
            ratios = ", ".join(f"{key} {value:.2f}" for key, value in border.items() if key != "at")
            lines.append(f"    stock tile border at {border['at']}: {ratios}")
    if not any(report["borders"] for report in result["seams"].values()):
        lines.append("no stock tile border within this size")
    lines.append(f"pictures and every line: {result['output_directory']}")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    arguments = parse(sys.argv[1:] if argv is None else argv)
    try:
        arguments.output_directory.mkdir(parents=True, exist_ok=True)
        paths = render(arguments) if arguments.against_reference else arguments.videos
        result = compare(*(open_clip(path) for path in paths), arguments)
    except (NotComparable, RenderFailed, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    failed = failures(result, arguments)
    print(table(result))
    for line in failed:
        print(line, file=sys.stderr)
    print(json.dumps({**result, "passed": not failed, "failed": failed}))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
