"""The definition of 3-D neighborhood attention: one softmax per query, in fp32, for small grids."""

import itertools
from collections.abc import Sequence

import torch

from layers.neighborhood_attention.geometry import check_inputs, window_start


def neighborhood_attention_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    kernel_size: Sequence[int],
    *,
    q_start: Sequence[int] = (0, 0, 0),
    kv_start: Sequence[int] = (0, 0, 0),
    grid: Sequence[int] | None = None,
) -> torch.Tensor:
    """softmax(q . k) v over the kernel_size[0] x kernel_size[1] x kernel_size[2] window of every query.

    q (B, Tq, Hq, Wq, heads, head_dim) is pre-scaled by head_dim**-0.5; k, v (B, Tk, Hk, Wk, heads, head_dim). A query
    at global position p on an axis of length L sees the keys [clamp(p - K//2, 0, L - K), +K) (Hassani et al., "Faster
    Neighborhood Attention", 2024). q_start, kv_start, grid and what raises ValueError: geometry.check_inputs.
    Returns q's shape and dtype; the arithmetic is fp32, or fp64 for fp64 inputs.
    """
    axes = check_inputs(q, k, v, kernel_size, q_start=q_start, kv_start=kv_start, grid=grid)
    exact = torch.promote_types(q.dtype, torch.float32)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    for cell in itertools.product(*(range(axis.q_len) for axis in axes)):
        window = [slice(None)]
        for axis, i in zip(axes, cell, strict=True):
            begin = window_start(axis.q_start + i, axis.kernel, axis.length) - axis.kv_start
            window.append(slice(begin, begin + axis.kernel))
        keys = k[tuple(window)].flatten(1, 3).to(exact)
        values = v[tuple(window)].flatten(1, 3).to(exact)
        query = q[:, cell[0], cell[1], cell[2]].to(exact)
        weights = torch.einsum("bnd,bknd->bnk", query, keys).softmax(-1)
        out[:, cell[0], cell[1], cell[2]] = torch.einsum("bnk,bknd->bnd", weights, values).to(q.dtype)
    return out
