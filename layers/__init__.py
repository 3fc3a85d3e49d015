"""Tensors in, tensors out: attention, sequence parallelism and fused ops, with no dependency on diffusers."""
