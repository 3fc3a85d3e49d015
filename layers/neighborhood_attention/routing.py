"""One attention out of the chosen kernels: offsets for those that know none, tiled SDPA for what they cannot take."""

from collections import Counter
from collections.abc import Sequence

import torch

from layers.neighborhood_attention.backend import Backend, Size, Unserved
from layers.neighborhood_attention.geometry import Axis, check_inputs
from layers.neighborhood_attention.sdpa import neighborhood_attention_sdpa

_MIN_WIDTH = 32
"""Columns that a cut of the keys leaves: below, AITER does not take all kernels."""


class RoutedAttention:
    """A NeighborhoodAttention that calls one of `backends`: the first, or the one preferred for the kernel size.

    A call that it cannot serve goes to tiled SDPA and is counted in `routed`, by "backend: reason". `calls` counts all.
    """

    def __init__(self, backends: Sequence[Backend]) -> None:
        self.backends = tuple(backends)
        self.routed: Counter[str] = Counter()
        self.calls = 0
        self._preferred: dict[Size, Backend] = {}

    @property
    def takes_bound(self) -> bool:
        """Whether one of the kernels is faster with a softmax_bound."""
        return any(backend.takes_bound for backend in self.backends)

    def prefer(self, kernel_size: Size, backend: Backend) -> None:
        """Call `backend` for this kernel size from now on."""
        self._preferred[kernel_size] = backend

    def backend_for(self, kernel_size: Size) -> Backend:
        """The backend that calls of this kernel size go to."""
        return self._preferred.get(kernel_size, self.backends[0])

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        kernel_size: Sequence[int],
        *,
        q_start: Sequence[int] = (0, 0, 0),
        kv_start: Sequence[int] = (0, 0, 0),
        grid: Sequence[int] | None = None,
        softmax_bound: float | None = None,
    ) -> torch.Tensor:
        """See neighborhood_attention_reference, and na3d_flash_attn for `softmax_bound`."""
        kernel = (int(kernel_size[0]), int(kernel_size[1]), int(kernel_size[2]))
        axes = check_inputs(q, k, v, kernel, q_start=q_start, kv_start=kv_start, grid=grid)
        backend = self.backend_for(kernel)
        self.calls += 1
        try:
            if backend.takes_offsets:
                bound = {"softmax_bound": softmax_bound} if backend.takes_bound else {}
                return backend.attend(q, k, v, kernel, q_start=q_start, kv_start=kv_start, grid=grid, **bound)
            return _on_the_keys_grid(backend, q, k, v, kernel, axes)
        except Unserved as reason:
            self.routed[f"{backend.name}: {reason}"] += 1
        return neighborhood_attention_sdpa(q, k, v, kernel, q_start=q_start, kv_start=kv_start, grid=grid)


def _on_the_keys_grid(
    backend: Backend, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kernel: Size, axes: Sequence[Axis]
) -> torch.Tensor:
    """The queries as part of a grid that is the region of their keys, and the result cut out of it.

    Windows are the same there: a window is shifted only by a border of the whole grid, and where the keys hold a
    shifted window they reach that border; a window that is not shifted lies inside the keys as it is.
    """
    if q.shape == k.shape:
        return backend.attend(q, k, v, kernel)
    keys = [_keys(axis, at_least) for axis, at_least in zip(axes, (0, 0, _MIN_WIDTH), strict=True)]
    for dim, (axis, (begin, end)) in enumerate(zip(axes, keys, strict=True), start=1):
        k, v = (x.narrow(dim, begin - axis.kv_start, end - begin) for x in (k, v))
    inside = tuple(
        slice(axis.q_start - begin, axis.q_start - begin + axis.q_len)
        for axis, (begin, _) in zip(axes, keys, strict=True)
    )
    whole = q.new_zeros(k.shape)
    whole[:, *inside] = q
    return backend.attend(whole, k, v, kernel)[:, *inside]


def _keys(axis: Axis, at_least: int) -> tuple[int, int]:
    """The keys that the queries see, made `at_least` many where there are."""
    begin, end = axis.key_range(axis.q_start, axis.q_start + axis.q_len - 1)
    end = max(end, min(begin + at_least, axis.kv_start + axis.kv_len))
    return max(axis.kv_start, min(begin, end - at_least)), end
