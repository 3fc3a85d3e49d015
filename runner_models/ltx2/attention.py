"""The decoder's 3-D neighborhood attention, handed to the stock modules as a diffusers attention processor."""

from collections.abc import Callable
from typing import Any

import torch

NeighborhoodAttention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, tuple[int, int, int]], torch.Tensor]
"""(q, k, v, kernel_size) -> out; q, k, v (B, T, H, W, heads, head_dim), q already scaled."""


class NeighborhoodAttnProcessor:
    """Projects with the stock module (norm, scale, RoPE) and attends with `attention`.

    diffusers' own two processors are never used: FlexAttention's block mask needs 167 GiB on a 69x64x96 grid, and the
    NATTEN one only knows the hub.
    """

    def __init__(self, attention: NeighborhoodAttention) -> None:
        self.attention = attention

    def __call__(self, attn: Any, hidden_states: torch.Tensor, block_mask: None = None) -> torch.Tensor:
        """`hidden_states` (B, T, H, W, C) -> the same shape. The window needs no mask, so `block_mask` is None."""
        query, key, value = attn.project_qkv(hidden_states)
        hidden_states = self.attention(query, key, value, attn.kernel_size).flatten(-2)
        return attn.to_out[0](hidden_states)
