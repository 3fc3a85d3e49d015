"""From the model's pixels to bytes.

Layouts: B batch, C the three channels, F frames, H height, W width.
"""

import torch

CHUNK_BYTES = 64 * 2**20


def to_uint8(video_BCFHW: torch.Tensor, *, chunk_bytes: int = CHUNK_BYTES) -> torch.Tensor:
    """Turn the model's pixels into bytes on their device.

    The arithmetic is that of diffusers' `VideoProcessor.postprocess_video(..., "np")` (video_processor.py) followed by
    `(x * 255).round()`, always in fp32: the two agree bit for bit on fp32 input, and bf16 input is widened before any
    rounding, where diffusers denormalises in bf16.

    Args:
        video_BCFHW: (B, 3, F, H, W), any float dtype, values in [-1, 1]; values outside are clamped.
        chunk_bytes: bound on one fp32 temporary in bytes (at most two live at a time); a single frame may exceed it.

    Returns:
        (B, F, H, W, 3) uint8, contiguous.

    Raises:
        ValueError: the input is not (B, 3, F, H, W) in a float dtype.
    """
    if video_BCFHW.ndim != 5 or video_BCFHW.shape[1] != 3 or not video_BCFHW.is_floating_point():
        raise ValueError(f"expected float (B, 3, F, H, W), got {video_BCFHW.dtype} {tuple(video_BCFHW.shape)}")
    batch, channels, frames, height, width = video_BCFHW.shape
    out = torch.empty(batch, frames, height, width, channels, dtype=torch.uint8, device=video_BCFHW.device)
    step = max(1, chunk_bytes // max(1, batch * channels * height * width * 4))
    for start in range(0, frames, step):
        chunk = video_BCFHW[:, :, start : start + step].float() * 0.5
        chunk = chunk.add_(0.5).clamp_(0, 1).mul_(255).round_()
        out[:, start : start + step] = chunk.permute(0, 2, 3, 4, 1)
    return out
