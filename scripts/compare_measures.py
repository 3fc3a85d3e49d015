"""Measures of compare_videos.py: PSNR and SSIM by frame, seams by row and column, the sound.

Grey levels are those of 8-bit RGB. Layouts: H height, W width, C channels, N samples.
"""

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from skimage.color import rgb2gray
from skimage.metrics import mean_squared_error, structural_similarity

TILE, STRIDE, SMALLEST = 768, 704, 48
"""Pixels of the stock decoder's tiles, from the start of one to the next, and of the shortest last tile (kernels 5 and
11 at 8 and 4 pixels a cell); diffusers' ltx2_diffusion_decoder.py. Overlaps are TILE - STRIDE wide."""
FLOOR = 0.05
"""Grey levels added to both sides of a ratio, so that rounding of nearly equal videos is not called a seam."""


def psnr(a_HWC: np.ndarray, b_HWC: np.ndarray) -> float:
    """dB over RGB, infinite for equal frames."""
    error = mean_squared_error(a_HWC, b_HWC)
    return 10 * math.log10(255**2 / error) if error else math.inf


def ssim(a_HWC: np.ndarray, b_HWC: np.ndarray) -> float:
    """Structural similarity of the luma (BT.709 weights), 7x7 windows; 1 for equal frames."""
    return float(structural_similarity(rgb2gray(a_HWC), rgb2gray(b_HWC), data_range=1.0))


def tile_borders(length: int, *, tile: int = TILE, stride: int = STRIDE) -> list[int]:
    """First pixel of every tile but the first on an axis of `length` pixels, by the stock decoder's rule."""
    if length <= tile:
        return []
    return [start for start in range(stride, length, stride) if length - start >= SMALLEST]


@dataclass
class Seams:
    """What adds up over the frames on one axis (0 rows, 1 columns), all in mean grey levels.

    `difference[p]`: |B - A| of line p. `step[p]`: how much B - A changes from line p - 1 to p; a hard border stands out
    there. `own_step` is the same of A and of B themselves.
    """

    axis: int
    frames: int = 0
    difference: Any = 0.0
    step: Any = 0.0
    own_step: list[Any] = field(default_factory=lambda: [0.0, 0.0])

    def add(self, a_HWC: np.ndarray, b_HWC: np.ndarray) -> None:
        """One more pair of uint8 frames."""
        a, b = a_HWC.astype(np.int16), b_HWC.astype(np.int16)
        other = (1 - self.axis, 2)
        delta = b - a
        self.frames += 1
        self.difference = self.difference + np.abs(delta).mean(axis=other)
        self.step = self.step + self._steps(delta, other)
        self.own_step = [kept + self._steps(x, other) for kept, x in zip(self.own_step, (a, b), strict=True)]

    def _steps(self, x_HWC: np.ndarray, other: tuple[int, int]) -> np.ndarray:
        steps = np.abs(np.diff(x_HWC, axis=self.axis)).mean(axis=other)
        return np.concatenate([steps[:1], steps])  # line 0 has none before it

    def report(self, borders: list[int], *, overlap: int) -> dict[str, Any]:
        """Where the largest step is, and every border's ratios; those of about 1 are what a video without seams has.

        `step`: at the border over the median line. `band`: the mean difference over the `overlap` lines that two tiles
        blend, over that of all other lines. `step_of_a`, `step_of_b`: the jump in the video itself over the median of
        the 64 lines around.
        """
        step = self.step / self.frames
        inner = step[1:]
        at = int(inner.argmax()) + 1
        return {
            "mean_difference": float((self.difference / self.frames).mean()),
            "largest_step": {"at": at, "grey_levels": float(step[at]), "ratio": _ratio(step[at], np.median(inner))},
            "borders": [self._border(border, borders, overlap, step) for border in borders],
        }

    def _border(self, border: int, borders: list[int], overlap: int, step: np.ndarray) -> dict[str, Any]:
        difference = self.difference / self.frames
        inside = np.zeros(len(difference), bool)
        for other in borders:
            inside[other : other + overlap] = True
        outside = difference[~inside].mean() if not inside.all() else difference.mean()
        return {
            "at": border,
            "step": _ratio(step[border], np.median(step[1:])),
            "band": _ratio(difference[border : border + overlap].mean(), outside),
            "step_of_a": self._own(0, border),
            "step_of_b": self._own(1, border),
        }

    def _own(self, which: int, border: int) -> float:
        steps = self.own_step[which] / self.frames
        return _ratio(steps[border], np.median(steps[max(border - 32, 1) : border + 32]))


def _ratio(value: float, usual: float) -> float:
    return float((value + FLOOR) / (usual + FLOOR))


def worst_seam(reports: dict[str, dict[str, Any]]) -> float | None:
    """How many times a border differs from the other lines, up or down, by `step` or `band`; None without borders.

    Down, because two blended tiles are smoother than either where their noise differs.
    """
    ratios = [border[kind] for report in reports.values() for border in report["borders"] for kind in ("step", "band")]
    return max((max(ratio, 1 / ratio) for ratio in ratios), default=None)


def audio_difference(a_CN: np.ndarray, b_CN: np.ndarray) -> dict[str, Any]:
    """Over the samples both have: signal (A) to difference in dB, None where equal, and the largest difference."""
    count = min(a_CN.shape[1], b_CN.shape[1])
    a, b = a_CN[:, :count].astype(np.float64), b_CN[:, :count].astype(np.float64)
    noise, signal = np.square(a - b).sum(), np.square(a).sum()
    snr = None if noise == 0 else 10 * math.log10(signal / noise) if signal else -math.inf
    return {
        "samples": [a_CN.shape[1], b_CN.shape[1]],
        "equal": bool(noise == 0),
        "snr_db": max(snr, -999.0) if snr is not None else None,
        "largest_difference": float(np.abs(a - b).max()) if count else 0.0,
    }
