"""What report.py says: results in, sections out. No figure is computed here but ratios of measured ones."""

from collections.abc import Iterable, Sequence

from report_data import Results, Row, Source, Spread
from report_page import Plot, Section, Table
from report_parts import decodes, fused, kernels, requests, roofline, transformers
from report_plots import bars, scaling, to_svg
from report_words import BASELINE, PEERS, best_exact, by, is_ours, main_kernels, named, rank_words, ref, short

HARDWARE = (("H200", "NVIDIA H200"), ("MI300X", "AMD Instinct MI300X"), ("MI350X", "AMD Instinct MI350X"))
"""Part of a device's name, and how it is called here."""
RANKS = (1, 2, 4, 8)
SIZES = ("1536x1024x121", "1024x1536x121")
"""Width x height x frames at which places are compared; both turns are the same work."""


def sections(results: Results) -> list[Section]:
    """In the order of the page."""
    return [
        glance(results),
        coverage(results),
        requests(results),
        decodes(results),
        roofline(results),
        fused(results),
        scaling_section(results),
        memory(results),
        transformers(results),
        kernels(results),
        sources(results),
        skipped(results),
    ]


def glance(results: Results) -> Section:
    """Each ratio is between two figures of one run."""
    rows: list[list[str | None]] = []
    used: list[Source] = []

    def add(what: str, ours: str, mine: Spread, other: str, theirs: Spread, unit: str, source: Source) -> None:
        times = f"{theirs.median / mine.median:.2f}x"
        rows.append(
            [
                what,
                f"{ours}: {short(mine.median)} {unit}",
                f"{other}: {short(theirs.median)} {unit}",
                times,
                ref(source),
            ]
        )
        used.extend([source] if source not in used else [])

    for peer in PEERS:
        pairs = list(_peer_pairs(results.requests, peer))
        for mine, other in pairs:
            assert mine.time is not None
            assert other.time is not None
            name = f"whole request, {mine.work}, {rank_words(mine.ranks)}"
            add(name, mine.variant, mine.time, other.variant, other.time, "s", mine.source)
        if not pairs:
            rows.append([f"whole request against {peer}", None, None, None, ""])
    for found in results.decodes:
        best, baseline = best_exact(found), named(found.rows, BASELINE)
        if best and best.time and baseline and baseline.time:
            name = f"video decode, {found.work}, {rank_words(best.ranks)}"
            add(name, best.variant, best.time, baseline.variant, baseline.time, "s", found.source)
    for (source, stage), group in by(results.transformers, lambda r: (r.source, r.stage)).items():
        variants = {row.variant: row for row in group}
        if {"stock", "compiled"} <= set(variants):
            name = f"transformer forward, stage {stage}, {group[0].video_tokens:,} tokens, {rank_words(group[0].ranks)}"
            add(name, "compiled", variants["compiled"].time, "stock", variants["stock"].time, "ms", source)
    for source, group in by(main_kernels(results), lambda r: r.source).items():
        for (grid, kernel), shape in by(group, lambda r: (r.grid, r.kernel)).items():
            variants = {row.variant: row.time for row in shape if row.layout == "views" and row.time}
            if {"tile", "sdpa"} <= set(variants) and kernel == "11,11,11":
                times = (variants["tile"], "tiled SDPA", variants["sdpa"])
                add(f"attention {grid}, kernel {kernel}", "tile", *times, "ms", source)
    return Section(
        "At a glance",
        [
            "Medians; both figures of a line are of one run, on one device, doing the same work. Sizes are width x "
            "height x frames; attention grids frames x height x width x heads.",
            Table(("what", "ours", "against", "times faster", "source"), rows, used),
        ],
    )


def coverage(results: Results) -> Section:
    """What has run where, at one size, so that a line can be compared with the next."""
    devices = [part for part, _ in HARDWARE]
    others = sorted({s.device for s in results.sources if not any(part in s.device for part in devices)})
    rows: list[list[str | None]] = []
    for part in [*devices, *others]:
        name = dict(HARDWARE).get(part, part)
        for ranks in RANKS:
            cells = _covered(results, part, ranks)
            if part in devices or any(cells[:3]):
                rows.append([name, rank_words(ranks), *cells])
    return Section(
        "What has been measured where",
        [
            f"Our fastest median at {SIZES[0]}: the distilled request, the exact decode on the device, a forward of "
            "stage 2; and the most that the attention kernel, which runs on one GPU, reached at any shape.",
            Table(("device", "ranks", "whole request", "video decode", "stage-2 forward", "attention kernel"), rows),
        ],
    )


def _covered(results: Results, part: str, ranks: int) -> list[str | None]:
    """The cells of one line."""

    def fastest(rows: Iterable[Row]) -> str | None:
        here = (row for row in rows if row.ranks == ranks and part in row.source.device and is_ours(row))
        times = [row.time.median for row in here if row.time and any(size in row.work for size in SIZES)]
        return f"{short(min(times))} s" if times else None

    decoded = [row for result in results.decodes if (row := best_exact(result))]
    at = [row for row in results.transformers if row.ranks == ranks and part in row.source.device]
    forwards = [row.time.median for row in at if row.stage == 2]
    kernel = [row.useful_tflops for row in results.kernels if part in row.source.device]
    return [
        fastest(row for row in results.requests if " full " not in row.work),
        fastest(decoded),
        f"{short(min(forwards))} ms" if forwards else None,
        "-" if ranks > 1 else f"{short(max(kernel))} TFLOP/s" if kernel else None,
    ]


def scaling_section(results: Results) -> Section:
    """Seconds over rank counts, measured and modelled apart."""
    curves: list[tuple[str, dict[int, float], bool]] = []
    used: list[Source] = []
    drawn_from: list[Source] = []

    def add(label: str, points: dict[int, float], modelled: bool, who: Sequence[Source]) -> None:
        curves.append((label, points, modelled))
        drawn_from.extend(who if len(points) > 1 else ())
        used.extend(source for source in who if source not in used)

    for (work, device), group in by(results.decodes, lambda r: (r.work, r.source.device)).items():
        best = [row for result in group if (row := best_exact(result)) and row.time]
        points = {row.ranks: row.time.median for row in best if row.time}
        add(f"decode {work}, {device}", points, False, [row.source for row in best])
        for result in group:
            if result.shares and 1 in points:
                shares = {1: points[1]} | {ranks: seconds for ranks, seconds, _ in result.shares}
                add(f"decode {work}, {device}: model", shares, True, [result.source])
    ours = [row for row in results.requests if is_ours(row) and row.time]
    for (work, device, variant), rows_ in by(ours, lambda r: (r.work, r.source.device, r.variant)).items():
        points = {row.ranks: row.time.median for row in rows_ if row.time}
        add(f"request {work}, {variant}, {device}", points, False, [row.source for row in rows_])
    curves = [curve for curve in curves if curve[1]]
    counts = sorted({*RANKS, *(ranks for _, points, _ in curves for ranks in points)})
    rows = [[label, *(f"{short(points[n])} s" if n in points else None for n in counts)] for label, points, _ in curves]
    blocks: list[str | Table | Plot] = [
        'A "model" line is the share of one rank, timed on one GPU with its halo rows and without the transfers: what '
        "several GPUs could reach, not what any did.",
        Table(("what", *(rank_words(n) for n in counts)), rows or [["decode", *[None] * len(counts)]], used),
    ]
    drawn = [curve for curve in curves if len(curve[1]) > 1]
    if drawn:
        figure = scaling(drawn, title="Over rank counts")
        name = "report_scaling"
        blocks.append(
            Plot(
                name,
                to_svg(figure, name),
                "Speed-up over rank counts, measured and modelled",
                list(dict.fromkeys(drawn_from)),
            )
        )
    return Section("Scaling", blocks)


def memory(results: Results) -> Section:
    """Peaks of everything that recorded one."""
    entries = [("decode", row) for result in results.decodes for row in result.rows if row.peaks]
    entries += [("request", row) for row in results.requests if row.peaks]
    rows: list[list[str | None]] = [
        [what, row.variant, rank_words(row.ranks), row.work, f"{max(row.peaks):.1f}", ref(row.source)]
        for what, row in entries
    ]
    rows += [
        ["decode, model", "one rank's share", rank_words(ranks), result.work, f"{gib:.1f}", ref(result.source)]
        for result in results.decodes
        for ranks, _, gib in result.shares
    ]
    used = list(dict.fromkeys(row.source for _, row in entries))
    headers = ("what", "variant", "ranks", "work", "peak GiB of the fullest rank", "source")
    blocks: list[str | Table | Plot] = [
        "Most that the allocator held at once. Of a decode that is its own weights, latents and work; of a request "
        "also the transformer and the text encoder.",
        Table(headers, rows or [["decode", "exact", "", "", None, ""]], used),
    ]
    if entries:
        labels = [f"{what}: {row.variant} {ref(row.source)}" for what, row in entries]
        peaks = [max(row.peaks) for _, row in entries]
        figure = bars(labels, peaks, unit="GiB", title="Peak memory", ours=[is_ours(row) for _, row in entries])
        blocks.append(Plot("report_memory", to_svg(figure, "report_memory"), "Peak memory of each variant", used))
    return Section("Memory", blocks)


def sources(results: Results) -> Section:
    """Every file that was read."""
    rows = [
        [
            f"[{s.number}]",
            s.file,
            s.device,
            s.date,
            s.commit,
            ", ".join(f"{name} {value}" for name, value in s.versions),
            s.command,
        ]
        for s in results.sources
    ]
    return Section("Sources", [Table(("", "file", "device", "date", "commit", "versions", "command"), rows)])


def skipped(results: Results) -> Section:
    """What was not read, and why."""
    if not results.skipped:
        return Section("Skipped files", ["None: every json of the folder was read."])
    return Section("Skipped files", [Table(("file", "why"), [list(entry) for entry in results.skipped])])


def _peer_pairs(rows: Sequence[Row], peer: str) -> Iterable[tuple[Row, Row]]:
    """Ours and the peer's, of one file and work; the first of ours."""
    for other in rows:
        if other.runner == peer and other.time:
            same = (r for r in rows if r.source == other.source and r.work == other.work and is_ours(r) and r.time)
            mine = next(same, None)
            if mine:
                yield mine, other
