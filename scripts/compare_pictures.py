"""Pictures of compare_videos.py: the worst frame side by side, and the seam profile."""

from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from compare_measures import Seams
from PIL import Image, ImageDraw

matplotlib.use("Agg")
from matplotlib import pyplot as plt

LABEL = 24
"""Pixels of the strip with the words."""


def side_by_side(a_HWC: np.ndarray, b_HWC: np.ndarray, *, title: str) -> Image.Image:
    """A, B and |B - A|, the last multiplied so that its largest value is white; the factor is in its label."""
    difference = np.abs(b_HWC.astype(np.int16) - a_HWC)
    largest = int(difference.max())
    gain = 255 / largest if largest else 1.0
    panels = [a_HWC, b_HWC, np.rint(difference * gain).astype(np.uint8)]
    height, width = a_HWC.shape[:2]
    sheet = Image.new("RGB", (3 * width + 16, height + LABEL), "white")
    draw = ImageDraw.Draw(sheet)
    for index, (panel, label) in enumerate(zip(panels, (f"A, {title}", "B", f"|B - A| x {gain:.1f}"), strict=True)):
        left = index * (width + 8)
        sheet.paste(Image.fromarray(panel), (left, LABEL))
        draw.text((left + 4, 6), label, fill="black")
    return sheet


def plot_seams(path: Path, seams: dict[str, Seams], reports: dict[str, dict[str, Any]], *, overlap: int) -> None:
    """Mean difference and step along both axes, the stock tiles' overlaps shaded."""
    figure, panels = plt.subplots(2, 2, figsize=(12, 6), constrained_layout=True, sharex="col")
    for column, (name, seam) in enumerate(seams.items()):
        for panel, values, what in zip(
            panels[:, column],
            (seam.difference, seam.step),
            ("mean |B - A|", "step of B - A to the line before"),
            strict=True,
        ):
            panel.plot(values / seam.frames, linewidth=0.9, color="#2b6cb0")
            panel.set_ylim(bottom=0)
            panel.set_ylabel(f"{what}\n(grey levels)")
            panel.grid(alpha=0.25)
            for border in reports[name]["borders"]:
                panel.axvspan(border["at"], border["at"] + overlap, color="#dd6b20", alpha=0.2, linewidth=0)
        panels[1, column].set_xlabel(f"{name[:-1]} (pixels)")
        borders = len(reports[name]["borders"])
        panels[0, column].set_title(
            f"by {name[:-1]}, {f'{borders} tile overlap(s) shaded' if borders else 'no tile border'}"
        )
    figure.savefig(path, dpi=110)
    plt.close(figure)
