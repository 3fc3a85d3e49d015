"""Sections of report.py that show one kind of result each: requests, decodes, rooflines, transformers, kernels."""

import re

from report_data import KernelRow, OpRow, Results, Row, TransformerRow
from report_page import Plot, Section, Table
from report_plots import bars, grouped, roof, stacked, to_svg
from report_words import (
    BASELINE,
    DECODE_STAGES,
    PEERS,
    STAGES,
    by,
    in_order,
    is_ours,
    l2,
    main_kernels,
    named,
    plot_of,
    rank_words,
    ref,
    short,
    spread,
)


def requests(results: Results) -> Section:
    """Whole requests: totals, stages."""
    section = Section(
        "Whole requests",
        [
            "Prompt to frames on the host; mux, what writing the file takes after that, is not in the total. Median "
            "(least to most); the first request of a process is among them where a bench had no warm-up.",
        ],
    )
    groups = by(results.requests, lambda row: row.work)
    for work in sorted(groups, key=lambda work: " full " in work):
        group = groups[work]
        rows: list[list[str | None]] = []
        for row in sorted(group, key=lambda row: (row.ranks, row.source.number)):
            reference = next((r for r in group if r.source == row.source and is_ours(r) and r.time), None)
            ratio = row.time.median / reference.time.median if row.time and reference and reference.time else None
            rows.append(
                [
                    row.variant,
                    rank_words(row.ranks),
                    spread(row.time) if row.time else row.error or None,
                    "" if is_ours(row) else f"{ratio:.2f}x" if ratio else None,
                    _to_file(row),
                    ", ".join(f"{peak:.1f}" for peak in row.peaks) or None,
                    row.decode,
                    ref(row.source),
                ]
            )
        for peer in PEERS:
            if not any(row.runner == peer for row in group):
                rows.append([peer, "", None, None, None, None, "", ""])
        headers = (
            "variant",
            "ranks",
            "seconds",
            "time over ours",
            "to file, s",
            "peak GiB by rank",
            "decode, its attention",
            "source",
        )
        used = list(dict.fromkeys(row.source for row in group))
        section.blocks.append(Table(headers, rows, used, title=work))
        timed = [row for row in group if row.stages]
        if timed:
            names = in_order((name for row in timed for name in row.stages if name != "mux"), STAGES)
            parts = {n: [r.stages[n].median if n in r.stages else 0.0 for r in timed] for n in names}
            labels = [f"{row.variant}\n{rank_words(row.ranks)} {ref(row.source)}" for row in timed]
            figure = stacked(labels, parts, order=STAGES, unit="seconds, medians", title=f"{work}: seconds by stage")
            name = "report_request_" + re.sub(r"\W+", "_", work)
            section.blocks.append(Plot(name, to_svg(figure, name), f"Seconds by stage of {work}", used))
    if not results.requests:
        section.blocks.append(Table(("variant", "seconds"), [["ours", None], *([peer, None] for peer in PEERS)]))
    return section


def _to_file(row: Row) -> str | None:
    """Wall clock to the file, or what was written down in its place."""
    if row.to_file:
        return spread(row.to_file)
    return f"{spread(row.stages['mux'])} after the total" if "mux" in row.stages else None


def decodes(results: Results) -> Section:
    """The decode alone."""
    section = Section(
        "Video decode",
        [
            f'Latents to pixels on the device, random weights. "{BASELINE}" is the baseline: the stock decoder in '
            "overlapping tiles, with tiled SDPA in place of a neighborhood attention kernel. Relative L2 is to the "
            "stock untiled decode of the same noise; the stock tiles draw other noise, so that theirs says nothing.",
        ],
    )
    for result in results.decodes:
        baseline = named(result.rows, BASELINE)
        rows: list[list[str | None]] = []
        for row in result.rows:
            ratio = baseline.time.median / row.time.median if baseline and baseline.time and row.time else None
            rows.append(
                [
                    row.variant,
                    spread(row.time) if row.time else row.error or None,
                    f"{ratio:.2f}x" if ratio else None,
                    f"{row.peaks[0]:.1f}" if row.peaks else None,
                    "other noise" if "tiled" in row.variant and "untiled" not in row.variant else l2(row.relative_l2),
                ]
            )
        headers = ("variant", "seconds", "over the baseline", "peak GiB", "relative L2")
        title = f"{result.work}, {rank_words(result.rows[0].ranks if result.rows else 1)}"
        section.blocks.append(Table(headers, rows, [result.source], title=title))
        timed = [row for row in result.rows if row.time]
        times = [row.time for row in timed if row.time]
        if times:
            figure = bars(
                [row.variant for row in timed],
                [time.median for time in times],
                unit="seconds; whiskers: least and most",
                title=f"Decode of {title}",
                ours=[is_ours(row) for row in timed],
                spreads=[(time.low, time.high) for time in times],
            )
            section.blocks.append(plot_of("report_decode", figure, f"Seconds of each decode of {title}", result.source))
        if result.stage_ms:
            names = in_order((name for stages in result.stage_ms.values() for name in stages), DECODE_STAGES)
            parts = {name: [stages.get(name, 0.0) for stages in result.stage_ms.values()] for name in names}
            figure = stacked(
                list(result.stage_ms),
                parts,
                order=DECODE_STAGES,
                unit="milliseconds, one run",
                title="Exact decode by stage",
            )
            section.blocks.append(
                plot_of("report_stages", figure, "Milliseconds by stage of the decode", result.source)
            )
    if not results.decodes:
        section.blocks.append(Table(("variant", "seconds"), [["exact", None], [BASELINE, None]]))
    return section


def roofline(results: Results) -> Section:
    """Floors by counting, beside what was measured."""
    section = Section(
        "Roofline of the decode",
        [
            "Bytes and FLOPs of each stage by counting; the floor is what they would take at the device's bandwidth "
            "and matrix throughput; then what the stage took.",
        ],
    )
    headers = ("stage", "GB", "TFLOP", "FLOP per byte", "floor, ms", "measured, ms", "of the floor")
    for result in results.decodes:
        for way, stages in result.roofline.items():
            rows: list[list[str | None]] = [
                [
                    row.stage,
                    short(row.bytes / 1e9) if row.bytes else None,
                    short(row.flops / 1e12) if row.flops else None,
                    short(row.flops / row.bytes) if row.flops and row.bytes else None,
                    short(row.floor_ms),
                    short(row.measured_ms) if row.measured_ms is not None else None,
                    f"{row.measured_ms / row.floor_ms:.2f}x" if row.measured_ms and row.floor_ms else None,
                ]
                for row in stages
            ]
            section.blocks.append(Table(headers, rows, [result.source], title=f"{result.work} {way}".strip()))
            if way != next(iter(result.roofline)):
                continue  # a plot of the first way; the others differ little
            groups = {"floor": [row.floor_ms for row in stages], "measured": [row.measured_ms or 0.0 for row in stages]}
            figure = grouped([row.stage for row in stages], groups, unit="milliseconds", title="Floor and measured")
            section.blocks.append(plot_of("report_roofline", figure, "Floor and measured time by stage", result.source))
    if len(section.blocks) == 1:
        section.blocks.append(Table(headers, [["all stages", *[None] * 6]]))
    return section


def fused(results: Results) -> Section:
    """The decoder's fused ops under the ceilings of their own run."""
    section = Section(
        "Fused ops of the decoder",
        [
            "The floor is the larger of what the bytes take at the device's copy rate and the products at its matrix "
            "rate, both measured in the same run. Ops without products are in the table alone.",
        ],
    )
    headers = ("op", "shape", "ms", "GB", "TFLOP", "floor, ms", "of the floor", "relative L2")
    for result in results.fused:
        rows = [_op(row) for row in result.rows]
        rates = f"copies {result.copy_rate / 1e9:,.0f} GB/s, products {result.flop_rate / 1e12:.0f} TFLOP/s"
        section.blocks.append(Table(headers, rows, [result.source], title=rates))
        points = [
            (f"{row.op}, {row.shape}", row.flops / row.bytes, row.flops / row.time.median * 1e3)
            for row in result.rows
            if row.time and row.flops and row.bytes
        ]
        if points:
            rates_ = {"bytes_per_s": result.copy_rate, "flops_per_s": result.flop_rate}
            figure = roof(points, **rates_, title="Fused ops under the ceilings of their run")
            section.blocks.append(plot_of("report_fused", figure, "Roofline of the fused ops", result.source))
    if not results.fused:
        section.blocks.append(Table(headers, [["all ops", *[None] * 7]]))
    return section


def _op(row: OpRow) -> list[str | None]:
    if row.time is None:
        return [row.op, row.shape, row.error, *[None] * 5]
    floor = max(row.bytes_ms, row.flops_ms)
    work = [short(row.bytes / 1e9), short(row.flops / 1e12) if row.flops else "0", short(floor)]
    ratio = f"{row.time.median / floor:.2f}x" if floor else None
    return [row.op, row.shape, spread(row.time), *work, ratio, l2(row.relative_l2)]


def transformers(results: Results) -> Section:
    """One forward by stage."""
    blocks: list[str | Table | Plot] = [
        "One forward of the transformer with random weights, device idle before and after."
    ]
    for source, group in by(results.transformers, lambda r: r.source).items():
        stock = {row.stage: row.time.median for row in group if row.variant == "stock"}
        rows = [_forward(row, stock.get(row.stage)) for row in group]
        headers = ("stage", "video tokens", "variant", "ranks", "ms", "over stock", "relative L2")
        blocks.append(Table(headers, rows, [source]))
    if not results.transformers:
        blocks.append(Table(("stage", "variant", "ms"), [["1", "compiled", None], ["2", "compiled", None]]))
    return Section("Transformer", blocks)


def _forward(row: TransformerRow, stock: float | None) -> list[str | None]:
    ratio = f"{stock / row.time.median:.2f}x" if stock else None
    error = "" if row.variant == "stock" else l2(row.relative_l2)
    return [str(row.stage), f"{row.video_tokens:,}", row.variant, rank_words(row.ranks), spread(row.time), ratio, error]


def kernels(results: Results) -> Section:
    """Useful TFLOP/s by shape; the file with the most shapes is drawn, the others are folded."""
    section = Section(
        "Attention kernel",
        [
            "Useful work alone is counted: 4 x head_dim x T x H x W x heads x the product of the kernel. The share is "
            "of dense cuDNN SDPA at head_dim 64 in the same run.",
        ],
    )
    drawn = main_kernels(results)
    for source, group in by(results.kernels, lambda r: r.source).items():
        main = bool(drawn) and source == drawn[0].source
        if main:
            views = [row for row in group if row.layout == "views" and row.time]
            shapes = list(dict.fromkeys((row.grid, row.kernel) for row in views))
            found = {(row.grid, row.kernel, row.variant): row.useful_tflops for row in views}
            names = list(dict.fromkeys(row.variant for row in views))
            groups = {name: [found.get((*shape, name), 0.0) for shape in shapes] for name in names}
            labels = [f"{grid}\n{kernel}" for grid, kernel in shapes]
            figure = grouped(labels, groups, unit="useful TFLOP/s", title="Views of a fused QKV projection")
            section.blocks.append(plot_of("report_kernel", figure, "Useful TFLOP/s of each kernel by shape", source))
        headers = ("grid", "kernel", "variant", "layout", "ms", "useful TFLOP/s", "of dense", "relative L2")
        rows = [_kernel(row) for row in group]
        section.blocks.append(Table(headers, rows, [source], title=f"All figures of {source.file}", folded=True))
    if not results.kernels:
        section.blocks.append(Table(("grid", "variant", "ms"), [["79x192x192x4", "tile", None]]))
    return section


def _kernel(row: KernelRow) -> list[str | None]:
    if row.time is None:
        return [row.grid, row.kernel, row.variant, row.layout, "wrong, not timed", None, None, l2(row.relative_l2)]
    time = spread(row.time)
    share = f"{row.of_dense:.0%}"
    return [
        row.grid,
        row.kernel,
        row.variant,
        row.layout,
        time,
        f"{row.useful_tflops:.1f}",
        share,
        l2(row.relative_l2),
    ]
