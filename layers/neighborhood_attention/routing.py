"""One attention out of the chosen kernels: offsets for those that know none, tiled SDPA for what they cannot take."""

from collections import Counter
from collections.abc import Sequence

import torch

from layers.neighborhood_attention.backend import Backend, Size, Unserved
from layers.neighborhood_attention.geometry import Axis, check_inputs
from layers.neighborhood_attention.sdpa import neighborhood_attention_sdpa


class RoutedAttention:
    """A NeighborhoodAttention that calls one of `backends`: the first, or the one preferred for the kernel size.

    A call that it cannot serve goes to tiled SDPA and is counted in `routed`, by "backend: reason". `calls` counts all.
    """

    def __init__(self, backends: Sequence[Backend]) -> None:
        self.backends = tuple(backends)
        self.routed: Counter[str] = Counter()
        self.calls = 0
        self._preferred: dict[Size, Backend] = {}

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
    ) -> torch.Tensor:
        """See neighborhood_attention_reference."""
        kernel = (int(kernel_size[0]), int(kernel_size[1]), int(kernel_size[2]))
        axes = check_inputs(q, k, v, kernel, q_start=q_start, kv_start=kv_start, grid=grid)
        backend = self.backend_for(kernel)
        self.calls += 1
        try:
            if backend.takes_offsets:
                return backend.attend(q, k, v, kernel, q_start=q_start, kv_start=kv_start, grid=grid)
            return _on_the_keys_grid(backend, q, k, v, kernel, axes)
        except Unserved as reason:
            self.routed[f"{backend.name}: {reason}"] += 1
        return neighborhood_attention_sdpa(q, k, v, kernel, q_start=q_start, kv_start=kv_start, grid=grid)


def _on_the_keys_grid(
    backend: Backend, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kernel: Size, axes: Sequence[Axis]
) -> torch.Tensor:
    """The queries as part of a grid that is the keys' region, and the result cut out of it.

    Windows are the same there: a window is shifted only by a border of the whole grid, and where the keys hold a
    shifted window they reach that border; a window that is not shifted lies inside the keys as it is.
    """
    if q.shape == k.shape:
        return backend.attend(q, k, v, kernel)
    first = [axis.q_start - axis.kv_start for axis in axes]
    region = tuple(slice(i, i + axis.q_len) for i, axis in zip(first, axes, strict=True))
    whole = q.new_zeros(k.shape)
    whole[:, *region] = q
    return backend.attend(whole, k, v, kernel)[:, *region]
