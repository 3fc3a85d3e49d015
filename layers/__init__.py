"""Tensors in, tensors out: attention and sequence parallelism, with no dependency on diffusers."""
