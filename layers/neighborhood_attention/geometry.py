"""Where windows lie: the one rule every backend follows, and the one place where inputs are checked.

Layout everywhere in this package: (B, T, H, W, heads, head_dim). Positions are cells of the whole grid unless said
otherwise.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

AXES = ("T", "H", "W")


def window_start(position: int, kernel: int, length: int) -> int:
    """First key that a query at `position` sees on an axis of `length` cells; it sees `kernel` keys from there.

    The window is centred where it fits and shifted inward at the border, so it never shrinks (NATTEN's rule).
    """
    return min(max(position - kernel // 2, 0), length - kernel)


@dataclass(frozen=True)
class Axis:
    """One axis of a call: which cells of the whole grid the queries and the keys cover.

    `length` cells in the whole grid, windows of `kernel` cells; queries are [q_start, q_start + q_len) and keys
    [kv_start, kv_start + kv_len).
    """

    length: int
    kernel: int
    q_start: int
    q_len: int
    kv_start: int
    kv_len: int

    def key_range(self, first: int, last: int) -> tuple[int, int]:
        """[begin, end) of the keys that queries first..last (inclusive) see."""
        begin = window_start(first, self.kernel, self.length)
        return begin, window_start(last, self.kernel, self.length) + self.kernel


def check_inputs(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    kernel_size: Sequence[int],
    *,
    q_start: Sequence[int] = (0, 0, 0),
    kv_start: Sequence[int] = (0, 0, 0),
    grid: Sequence[int] | None = None,
) -> tuple[Axis, Axis, Axis]:
    """Check one call and describe its three axes.

    q is (B, Tq, Hq, Wq, heads, head_dim), k and v (B, Tk, Hk, Wk, heads, head_dim); kernel_size odd. `grid` is the
    whole (T, H, W) whose borders shift the windows; without it k and v are the whole grid. q_start and kv_start are
    the positions in it of the first element of q and of k, v.
    Raises ValueError for anything a backend could not compute.
    """
    if q.ndim != 6 or k.ndim != 6:
        raise ValueError(f"q, k and v must be (B, T, H, W, heads, head_dim); got {tuple(q.shape)} and {tuple(k.shape)}")
    if k.shape != v.shape:
        raise ValueError(f"k and v must have one shape; got {tuple(k.shape)} and {tuple(v.shape)}")
    if (q.shape[0], *q.shape[4:]) != (k.shape[0], *k.shape[4:]):
        raise ValueError(
            f"q {tuple(q.shape)} and k {tuple(k.shape)} must agree in all but T, H, W (batch, heads, head_dim)"
        )
    if not (q.dtype == k.dtype == v.dtype and q.dtype.is_floating_point):
        raise ValueError(f"q, k and v must have one floating-point dtype; got {q.dtype}, {k.dtype}, {v.dtype}")
    if not (q.device == k.device == v.device):
        raise ValueError(f"q, k and v must lie on one device; got {q.device}, {k.device}, {v.device}")
    if 0 in q.shape or 0 in k.shape:
        raise ValueError(f"no dimension may be 0; got q {tuple(q.shape)} and k {tuple(k.shape)}")
    if grid is None and any(kv_start):
        raise ValueError(f"kv_start {tuple(kv_start)} needs grid, the whole (T, H, W): without it k is the whole grid")
    for name, value in (("kernel_size", kernel_size), ("q_start", q_start), ("kv_start", kv_start), ("grid", grid)):
        if value is not None and len(value) != 3:
            raise ValueError(f"{name} {tuple(value)} must have three values (T, H, W)")
    whole = k.shape[1:4] if grid is None else grid
    axes = tuple(
        Axis(int(whole[i]), int(kernel_size[i]), int(q_start[i]), q.shape[1 + i], int(kv_start[i]), k.shape[1 + i])
        for i in range(3)
    )
    for name, axis in zip(AXES, axes, strict=True):
        _check_axis(name, axis)
    return axes[0], axes[1], axes[2]


def _check_axis(name: str, axis: Axis) -> None:
    if axis.kernel < 1 or axis.kernel % 2 == 0:
        raise ValueError(f"kernel_size {axis.kernel} on axis {name} must be odd and positive")
    if axis.kernel > axis.length:
        raise ValueError(
            f"kernel_size {axis.kernel} on axis {name} is longer than the grid there ({axis.length} cells)"
        )
    for what, start, count in (("q", axis.q_start, axis.q_len), ("k, v", axis.kv_start, axis.kv_len)):
        if start < 0 or start + count > axis.length:
            raise ValueError(
                f"{what} covers [{start}, {start + count}) on axis {name}; the grid has cells [0, {axis.length})"
            )
    begin, end = axis.key_range(axis.q_start, axis.q_start + axis.q_len - 1)
    if begin < axis.kv_start or end > axis.kv_start + axis.kv_len:
        raise ValueError(
            f"on axis {name} the windows of q need keys [{begin}, {end}); "
            f"k, v hold [{axis.kv_start}, {axis.kv_start + axis.kv_len})"
        )
