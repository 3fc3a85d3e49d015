"""Whether the kernels compute on this very device what reference.py defines: asked once, before they are used."""

import functools
import logging
import os
from collections.abc import Callable

import torch
import torch.nn.functional as F

from layers.fused import heads, narrow, pixels, reference, tokens
from layers.fused.launch import refuse, runs_kernels
from layers.neighborhood_attention.backend import architecture, kernel_errors, own_words

logger = logging.getLogger(__name__)

DISABLE = "LTX_RUNNER_DISABLE_FUSED"
"""Set to 1, it leaves the kernels out."""
TOLERANCE = 1e-2
"""Relative L2 of a result in bf16 or fp16; a wrong gain, angle or place is at 1e-1 and above."""
_GRID, _CHANNELS, _HEAD_DIM, _EPS = (2, 5, 24), 256, 64, 1e-6


@functools.cache
def verify(device: torch.device, dtype: torch.dtype) -> None:
    """Compare every kernel with plain torch on a small grid. Where one disagrees or cannot be built, the device runs
    plain torch from then on; either way there is a line in the log. Does nothing where kernels are not run at all.
    """
    if not runs_kernels(torch.empty(0, device=device, dtype=dtype)):
        return
    if os.environ.get(DISABLE) == "1":
        refuse(device, f"turned off by {DISABLE}")
        return
    for name, error in _Samples(device, dtype).checks():
        try:
            found = error()
        except kernel_errors() as failure:
            refuse(device, f"{name} cannot be run: {own_words(failure)}")
            return
        if not found <= TOLERANCE:
            refuse(device, f"{name} is off by {found:.1e} (relative L2, allowed {TOLERANCE:.0e})")
            return
    logger.info("fused kernels: in use, agree with plain torch on this %s", architecture(device))


class _Samples:
    """Random tokens and weights of a block of the decoder's last width, the same on every call."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(0)

        def randn(*shape: int, scale: float = 1.0) -> torch.Tensor:
            return (torch.randn(shape, generator=generator) * scale).to(device, dtype)

        channels = _CHANNELS
        self.x, self.y = randn(1, *_GRID, channels), randn(1, *_GRID, channels)
        self.qkv = randn(1, *_GRID, 3 * channels)
        self.gain, self.scale, self.shift = randn(channels), randn(channels), randn(channels)
        self.pending = randn(channels).float()
        self.w_qkv, self.bias = randn(3 * channels, channels, scale=channels**-0.5), randn(3 * channels)
        self.gate, self.up = (randn(4 * channels, channels, scale=channels**-0.5) for _ in range(2))
        self.down = randn(channels, 4 * channels, scale=channels**-0.5)
        self.norms = heads.HeadNorms(randn(2, _HEAD_DIM).float(), _EPS)
        frequencies = [torch.logspace(0, -3, pairs, device=device) for pairs in (8, 12, 12)]
        self.rotary = heads.rotary_table(frequencies, tuple(n + 3 for n in _GRID)).part((1, 2, 3))
        self.out = tuple(torch.full((1, *_GRID, 4, _HEAD_DIM), torch.nan, device=device, dtype=dtype) for _ in range(3))

    def checks(self) -> list[tuple[str, Callable[[], float]]]:
        """Names and what gives their relative L2."""
        return [
            ("the norm", self._norm),
            ("the gated product", lambda: _off(tokens.silu_mul_(self.x.clone(), self.y), self._silu())),
            ("the head norms", self._heads),
            ("the bytes", self._bytes),
            ("norm to Q, K, V", self._project),
            ("norm, gated MLP, residual", self._mlp),
        ]

    def _normed(self, x: torch.Tensor) -> torch.Tensor:
        modulation = {"scale": self.scale.float(), "shift": self.shift.float()}
        return reference.rms_norm(x.float(), self.gain, eps=_EPS, **modulation)

    def _silu(self) -> torch.Tensor:
        return reference.silu_mul(self.x.float(), self.y.float())

    def _norm(self) -> float:
        x = self.x.clone()
        modulation = {"scale": self.scale.view(1, 1, 1, 1, -1), "shift": self.shift.view(1, 1, 1, 1, -1)}
        got = tokens.add_rms_norm_(x, self.y, self.gain, eps=_EPS, **modulation)
        return max(_off(got, self._normed(self.x.float() + self.y.float())), _off(x, self.x.float() + self.y.float()))

    def _heads_of(self, qkv: torch.Tensor) -> torch.Tensor:
        parts = qkv.unflatten(-1, (3, -1, _HEAD_DIM))
        table = self.rotary.table, self.rotary.split, self.rotary.firsts
        q, k = (reference.norm_and_rotate(parts[..., i, :, :], self.norms.gains[i], *table, eps=_EPS) for i in (0, 1))
        return torch.stack((q, k, parts[..., 2, :, :]))

    def _heads(self) -> float:
        q, k, v = self.out
        heads.norm_rotate_heads(self.qkv, self.norms, self.rotary, out=(q, k, v))
        return _off(torch.stack(self.out), self._heads_of(self.qkv.float()))

    def _bytes(self) -> float:
        hidden = self.x[..., :48].contiguous()
        return _off(pixels.patches_to_bytes(hidden, 4), reference.patches_to_bytes(hidden, 4))

    def _project(self) -> float:
        if not narrow.serves(self.x, hidden=4 * _CHANNELS, head_dim=_HEAD_DIM):
            return 0.0
        q, k, v = (x.fill_(torch.nan) for x in self.out)
        into = narrow.fold_norm(self.w_qkv, self.bias, self.gain, (self.scale, self.shift), self.pending)
        narrow.project_heads(self.x, self.pending, into, self.norms, self.rotary, eps=_EPS, out=(q, k, v))
        qkv = F.linear(self._normed(self.x.float() + self.pending), self.w_qkv.float(), self.bias.float())
        return _off(torch.stack(self.out), self._heads_of(qkv))

    def _mlp(self) -> float:
        if not narrow.serves(self.x, hidden=4 * _CHANNELS, head_dim=_HEAD_DIM):
            return 0.0
        gate, up = (
            narrow.fold_norm(weight, None, self.gain, (self.scale, self.shift), self.pending)
            for weight in (self.gate, self.up)
        )
        got = narrow.gated_mlp_(self.x.clone(), self.pending, narrow.pack_mlp(gate, up, self.down), eps=_EPS)
        normed = self._normed(self.x.float() + self.pending)
        hidden = reference.silu_mul(F.linear(normed, self.gate.float()), F.linear(normed, self.up.float()))
        return _off(got, self.x.float() + self.pending + F.linear(hidden, self.down.float()))


def _off(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.float() - want.float()).norm() / want.float().norm())
