"""The plots of report.py, as SVG text: data in, drawing out, nothing chosen here but looks."""

import io
import re
from collections.abc import Mapping, Sequence

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

matplotlib.rcParams |= {
    "svg.hashsalt": "report",
    "svg.fonttype": "path",
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 11,
    "axes.titlelocation": "left",
}
COLORS = (
    "#2b6cb0", "#dd6b20", "#2f855a", "#805ad5", "#b7791f", "#c53030", "#4a5568", "#0987a0", "#d53f8c", "#97266d",
)  # fmt: skip
GREY, OURS = "#a0aec0", "#2b6cb0"
WIDTH = 9.0
"""Inches."""


def to_svg(figure: Figure, name: str) -> str:
    """An <svg> element whose ids are its own, so that several can stand in one page."""
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None}, bbox_inches="tight", pad_inches=0.08)
    svg = text.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r'\b(id="|href="#|url\(#)', rf"\g<1>{name}-", svg)
    return re.sub(r"[ \t]+$", "", svg, flags=re.MULTILINE)


def bars(
    labels: Sequence[str],
    values: Sequence[float | None],
    *,
    unit: str,
    title: str,
    ours: Sequence[bool],
    spreads: Sequence[tuple[float, float]] | None = None,
) -> Figure:
    """A horizontal bar each, ours in colour, least and most as whiskers; None is written as not measured."""
    figure, axes = _figure(0.36 * len(labels) + 1.0)
    known = [value or 0.0 for value in values]
    axes.barh(range(len(labels)), known, color=[OURS if own else GREY for own in ours], height=0.66)
    if spreads:
        errors = [[v - low for v, (low, _) in zip(known, spreads, strict=True)],
                  [high - v for v, (_, high) in zip(known, spreads, strict=True)]]  # fmt: skip
        axes.errorbar(known, range(len(labels)), xerr=errors, fmt="none", ecolor="#1a202c", elinewidth=1)
    tops = [high for _, high in spreads] if spreads else known
    for index, (value, top) in enumerate(zip(values, tops, strict=True)):
        text = "not measured" if value is None else _short(value)
        axes.annotate(text, (max(top, 0), index), (5, 0), textcoords="offset points", va="center")
    _label_rows(axes, labels)
    axes.set_xlim(0, max([*tops, 1e-9]) * 1.12)
    axes.set_xlabel(unit)
    axes.set_title(title)
    return figure


def stacked(
    labels: Sequence[str], parts: Mapping[str, Sequence[float]], *, order: Sequence[str], unit: str, title: str
) -> Figure:
    """A bar each, made of its parts as they come; `order` gives a part the same colour in every plot."""
    figure, axes = _figure(0.42 * len(labels) + 1.1)
    lefts = [0.0] * len(labels)
    most = max(sum(values[i] for values in parts.values()) for i in range(len(labels))) or 1.0
    for index, (name, values) in enumerate(parts.items()):
        color = COLORS[(order.index(name) if name in order else len(order) + index) % len(COLORS)]
        axes.barh(range(len(labels)), values, left=lefts, color=color, label=name, height=0.66)
        for row, (left, value) in enumerate(zip(lefts, values, strict=True)):
            if value > 0.055 * most:
                axes.text(left + value / 2, row, _short(value), ha="center", va="center", color="white", fontsize=9)
        lefts = [left + value for left, value in zip(lefts, values, strict=True)]
    for row, total in enumerate(lefts):
        axes.annotate(_short(total), (total, row), (5, 0), textcoords="offset points", va="center", weight="bold")
    _label_rows(axes, labels)
    axes.set_xlim(0, most * 1.1)
    axes.set_xlabel(unit)
    axes.set_title(title)
    axes.legend(
        loc="upper center", bbox_to_anchor=(0.5, -0.75 / figure.get_figheight()), ncols=7, frameon=False, fontsize=9
    )
    return figure


def scaling(series: Sequence[tuple[str, Mapping[int, float], bool]], *, title: str) -> Figure:
    """Speed-up over one rank: (label, seconds by ranks, whether it is a model). A lone point is a dot."""
    figure, axes = _figure(3.8)
    most = max(max(points) for _, points, _ in series)
    ticks = [ranks for ranks in (1, 2, 4, 8, 16, 32) if ranks <= max(most, 2)]
    axes.plot(ticks, ticks, color=GREY, linestyle=":", label="ideal")
    for index, (label, points, modelled) in enumerate(series):
        alone = points[min(points)] * min(points)
        x = sorted(points)
        y = [alone / points[ranks] for ranks in x]
        style = "--" if modelled else "-"
        face = "white" if modelled else COLORS[index % len(COLORS)]
        words = f"{label} ({y[-1]:.2f}x on {x[-1]})"
        axes.plot(x, y, style, marker="o", color=COLORS[index % len(COLORS)], markerfacecolor=face, label=words)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    for set_ticks in (axes.set_xticks, axes.set_yticks):
        set_ticks(ticks, [str(tick) for tick in ticks])
    axes.set_xlabel("ranks (GPUs)")
    axes.set_ylabel("times faster than one")
    axes.set_title(title)
    axes.grid(alpha=0.25)
    axes.legend(frameon=False, loc="upper left", fontsize=9)
    return figure


def roof(points: Sequence[tuple[str, float, float]], *, bytes_per_s: float, flops_per_s: float, title: str) -> Figure:
    """(label, FLOP per byte, FLOP a second) under the two ceilings, both axes logarithmic; points carry numbers."""
    figure, axes = _figure(4.6)
    ridge = flops_per_s / bytes_per_s
    xs = [x for _, x, _ in points]
    left, right = min([*xs, ridge]) / 3, max([*xs, ridge]) * 3
    axes.plot(
        [left, ridge, right], [left * bytes_per_s / 1e12, flops_per_s / 1e12, flops_per_s / 1e12], color="#1a202c"
    )
    axes.annotate(f"{flops_per_s / 1e12:.0f} TFLOP/s", (ridge, flops_per_s / 1e12), (4, 4), textcoords="offset points")
    middle = (left * ridge) ** 0.5
    slope = (middle, middle * bytes_per_s / 1e12)
    axes.annotate(f"{bytes_per_s / 1e9:,.0f} GB/s  ", slope, (-4, 2), textcoords="offset points", ha="right")
    for index, (label, x, y) in enumerate(points):
        color = COLORS[index % len(COLORS)]
        axes.plot([x], [y / 1e12], "o", color=color, label=f"{index + 1}  {label}")
        axes.annotate(str(index + 1), (x, y / 1e12), (5, -9), textcoords="offset points", color=color, fontsize=9)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_ylim(min(y for *_, y in points) / 2e12, flops_per_s / 6e11)
    axes.set_xlabel("FLOP per byte")
    axes.set_ylabel("TFLOP/s")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.set_major_formatter(lambda value, _: f"{value:g}")
        axis.set_minor_formatter(NullFormatter())
    axes.set_title(title)
    axes.grid(alpha=0.25)
    axes.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return figure


def grouped(labels: Sequence[str], groups: Mapping[str, Sequence[float]], *, unit: str, title: str) -> Figure:
    """A cluster of bars for each label."""
    figure, axes = _figure(0.21 * len(labels) * (len(groups) + 1) + 1.2)
    height = 1 / (len(groups) + 1)
    for index, (name, values) in enumerate(groups.items()):
        rows = [row + (index - (len(groups) - 1) / 2) * height for row in range(len(labels))]
        axes.barh(rows, values, height=height, color=COLORS[index % len(COLORS)], label=name)
        for row, value in zip(rows, values, strict=True):
            axes.annotate(_short(value), (value, row), (4, 0), textcoords="offset points", va="center", fontsize=8)
    _label_rows(axes, labels)
    axes.set_xlim(0, max(max(values) for values in groups.values()) * 1.1)
    axes.set_xlabel(unit)
    axes.set_title(title)
    axes.legend(
        frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.55 / figure.get_figheight()), ncols=6, fontsize=9
    )
    return figure


def _figure(height: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(WIDTH, height))
    return figure, figure.add_subplot()


def _label_rows(axes: Axes, labels: Sequence[str]) -> None:
    axes.set_yticks(range(len(labels)), labels)
    axes.invert_yaxis()
    axes.tick_params(axis="y", length=0)


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:#.3g}"
