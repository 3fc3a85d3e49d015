"""Functions that tests run in a worker process: see conftest.py of tests/unit."""

import torch

from layers.neighborhood_attention import na3d_flash_attn


def flash(q, k, v, kernel, **arguments):
    """na3d_flash_attn on a CPU, its output poisoned with NaN first."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)  # torch.empty fills with NaN
    return na3d_flash_attn(q, k, v, kernel, **arguments)


def flash_with_far_rows(q, k, v, kernel, *, row_stride, config):
    """na3d_flash_attn with k moved to storage whose rows (H) are row_stride elements apart, in untouched pages."""
    torch.use_deterministic_algorithms(False)
    _b, _t, h, w, heads, head_dim = k.shape
    plane = w * heads * head_dim
    storage = torch.empty(h * row_stride, dtype=k.dtype)
    far = storage.as_strided(k.shape, (0, plane, row_stride, heads * head_dim, head_dim, 1))
    far.copy_(k)
    return na3d_flash_attn(q, far, v, kernel, config=config)
