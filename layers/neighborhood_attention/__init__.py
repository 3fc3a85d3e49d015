"""3-D neighborhood attention: every query of a (T, H, W) grid attends to a fixed window around itself.

One contract, several implementations: reference (the definition), sdpa (any device and dtype), flash (Triton).
q, k, v are (B, T, H, W, heads, head_dim); q is pre-scaled.
"""

from layers.neighborhood_attention.flash import MAX_SOFTMAX_BOUND, na3d_flash_attn
from layers.neighborhood_attention.reference import neighborhood_attention_reference
from layers.neighborhood_attention.sdpa import neighborhood_attention_sdpa

__all__ = [
    "MAX_SOFTMAX_BOUND",
    "na3d_flash_attn",
    "neighborhood_attention_reference",
    "neighborhood_attention_sdpa",
]
