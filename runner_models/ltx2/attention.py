"""The decoder's 3-D neighborhood attention, handed to the stock modules as a diffusers attention processor."""

from typing import Any

import torch

from layers.neighborhood_attention.backend import NeighborhoodAttention
from runner_models.ltx2.qkv import fuse_qkv, project


class NeighborhoodAttnProcessor:
    """Projects with the stock module's weights (norm, scale, RoPE) and attends with `attention`.

    diffusers' own two processors are never used: FlexAttention's block mask needs 167 GiB on a 69x64x96 grid, and the
    NATTEN one only knows the hub.
    """

    def __init__(self, attention: NeighborhoodAttention) -> None:
        self.attention = attention

    def __call__(self, attn: Any, hidden_states: torch.Tensor, block_mask: None = None) -> torch.Tensor:
        """`hidden_states` (B, T, H, W, C) -> the same shape. The window needs no mask, so `block_mask` is None."""
        query, key, value = project(attn, hidden_states)
        query = attn.rope(attn.norm_q(query) * attn.scale)
        key = attn.rope(attn.norm_k(key))
        hidden_states = self.attention(query, key, value, attn.kernel_size).flatten(-2)
        return attn.to_out[0](hidden_states)


def install_attention(decoder: Any, attention: NeighborhoodAttention, *, fuse: bool) -> None:
    """Give every attention module of a stock diffusion decoder `attention`, and with `fuse` join their Q, K, V weights.

    With `fuse` the weights must have their final device and dtype; without, the first call joins them.
    """
    decoder.set_attn_processor(NeighborhoodAttnProcessor(attention))
    if fuse:
        for module in decoder.modules():
            if hasattr(module, "to_q"):
                fuse_qkv(module)
