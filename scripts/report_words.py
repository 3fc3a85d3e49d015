"""Small things that report.py's sections share: who is ours, how figures are written."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TypeVar

from matplotlib.figure import Figure
from report_data import DecodeResult, KernelRow, Results, Row, Source, Spread
from report_page import Plot
from report_plots import to_svg

PEERS = ("stock", "xfuser")
BASELINE = "stock tiled, sdpa"
"""What a runner without a neighborhood attention kernel does: the decode that speed-ups are over."""
STAGES = ("encode", "stage1", "upsample", "stage2", "video_decode", "audio_decode", "gather", "mux")
"""Of a request, in the order they run."""
DECODE_STAGES = ("start", "stage 1", "stage 2", "stage 3", "stage 4", "stage 5", "upsample", "stepexit", "crop")
"""Of a decode: its blocks, and the work between them."""
T = TypeVar("T")
K = TypeVar("K")


def is_ours(row: Row) -> bool:
    """A request of our runner, or an exact decode."""
    return row.runner == "ours" or row.variant.startswith("exact")


def best_exact(result: DecodeResult) -> Row | None:
    """The fastest exact decode that ends on the device."""
    rows = [row for row in result.rows if row.time and is_ours(row) and "host" not in row.variant]
    return min(rows, key=lambda row: row.time.median if row.time else 0.0, default=None)


def named(rows: Sequence[Row], variant: str) -> Row | None:
    """The row of that name."""
    return next((row for row in rows if row.variant == variant), None)


def main_kernels(results: Results) -> list[KernelRow]:
    """The rows of the file with the most shapes; of two, that read first."""
    groups = list(by(results.kernels, lambda r: r.source).values())
    return max(groups, key=lambda rows: len({(r.grid, r.kernel) for r in rows}), default=[])


def by(items: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    """Items by what `key` says of them, both in the order they came."""
    groups: dict[K, list[T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def in_order(names: Iterable[str], order: Sequence[str]) -> list[str]:
    """Each name once: those of `order` as there, then the others as they came."""
    found = list(dict.fromkeys(names))
    return [name for name in order if name in found] + [name for name in found if name not in order]


def plot_of(name: str, figure: Figure, alt: str, source: Source) -> Plot:
    """A plot of one file."""
    name = f"{name}_{Path(source.file).stem}"
    return Plot(name, to_svg(figure, name), alt, [source])


def short(value: float) -> str:
    """Three digits and no more."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:#.3g}" if value < 100 else f"{value:.1f}"


def spread(spread: Spread) -> str:
    """Median (least to most), runs."""
    text = short(spread.median)
    if short(spread.low) != short(spread.high):
        text += f" ({short(spread.low)} to {short(spread.high)})"
    return f"{text}, {spread.runs} run{'s' if spread.runs > 1 else ''}" if spread.runs else text


def l2(value: float | None) -> str | None:
    """A relative error."""
    return None if value is None else f"{value:.1e}" if value else "0"


def rank_words(ranks: int) -> str:
    """As in "1 rank", "2 ranks"."""
    return f"{ranks} rank{'s' if ranks > 1 else ''}"


def ref(source: Source) -> str:
    """The number of a source."""
    return f"[{source.number}]"
