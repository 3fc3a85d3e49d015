"""Inputs of the fused ops and what they should give, in fp64; on a CPU and on a GPU."""

import torch
from diffusers.models.autoencoders.ltx2_diffusion_decoder import LTX2VideoVaeRotaryPosEmbed3D

from layers.fused.heads import rotary_table
from layers.fused.narrow import FoldedLinear

TOKENS = [
    (1, 1, 1, 1, 1),
    (1, 1, 1, 1, 48),
    (1, 2, 3, 4, 1),
    (2, 3, 5, 7, 48),  # 105 tokens in blocks of 64
    (1, 3, 5, 7, 100),
    (2, 2, 3, 5, 256),
    (1, 1, 2, 3, 2048),
]
"""Shapes (B, T, H, W, C)."""
SILU = [(1,), (4096,), (5000,), (2, 3, 5, 7, 48)]
BYTES = [((1, 1, 1, 1), 1), ((2, 3, 5, 7), 4), ((1, 2, 3, 101), 4), ((2, 1, 3, 5), 2)]
"""(B, T, H, W) and patch; rows of 101 patches have more bytes than a block."""
HEADS = [
    ((1, 1, 1, 1), 1, 16, "dense", (0, 0, 0)),
    ((2, 2, 3, 5), 3, 16, "rows", (7, 3, 11)),
    ((2, 2, 3, 5), 4, 16, "in place", (400, 0, 2)),
    ((1, 3, 5, 7), 4, 32, "columns", (0, 96, 1)),
    ((2, 1, 7, 5), 3, 32, "frames", (5, 0, 0)),
    ((1, 3, 5, 7), 1, 64, "rows", (120, 1, 383)),  # 105 tokens in blocks of 64
    ((1, 2, 3, 4), 3, 64, "in place", (1, 2, 3)),
    ((2, 2, 3, 3), 4, 64, "columns", (0, 0, 9)),
    ((1, 2, 3, 5), 2, 16, "heads first", (3, 0, 1)),
    ((1, 1, 2, 3), 32, 64, "rows", (1, 1, 1)),
]
"""(B, T, H, W), heads, head_dim, where K and V lie (see fused_calls.py), starts."""
QKV = [
    ((1, 1, 1, 1), 32, 1, 16, "dense", (0, 0, 0)),
    ((2, 2, 3, 5), 64, 4, 16, "rows", (7, 3, 11)),
    ((2, 2, 3, 5), 64, 3, 16, "columns", (400, 0, 2)),  # heads that are not the width of the tokens
    ((1, 3, 5, 7), 128, 4, 32, "frames", (0, 96, 1)),
    ((1, 3, 5, 7), 64, 1, 64, "rows", (120, 1, 383)),  # 105 tokens: blocks of 64 and 128 both have a rest
    ((1, 2, 3, 13), 256, 4, 64, "columns", (0, 0, 9)),
    ((2, 2, 3, 5), 32, 2, 16, "heads first", (3, 0, 1)),
]
"""(B, T, H, W), channels, then as HEADS."""
MLP = [
    ((1, 1, 1, 1), 32, 32),
    ((2, 3, 5, 7), 64, 256),
    ((2, 1, 13, 5), 128, 96),
    ((1, 1, 1, 64), 32, 128),
    ((1, 2, 3, 13), 256, 1024),
]
"""(B, T, H, W), channels, hidden units."""
EPS, HEAD_EPS = 1e-3, 1e-2


def randn(*shape, dtype=torch.float32, seed=0, device="cpu"):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def error(got, want):
    """Relative L2."""
    want = want.double()
    return ((got.double() - want).norm() / want.norm()).item()


def norm64(x, gain, *, eps, scale=None, shift=None):
    """x / sqrt(mean x^2 + eps) * gain * scale + shift."""
    x = x.double()
    x = x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * gain.double()
    return x if scale is None else x * scale.double() + shift.double()


def modulation(batch, channels, dtype, device="cpu"):
    """Scale and shift as the model has them: parts of one projection, another for each entry of the batch."""
    whole = randn(batch, 2 * channels, dtype=dtype, seed=5, device=device)
    scale, shift = whole[:, None, None, None].chunk(2, dim=-1)
    scale += 1
    return {"scale": scale, "shift": shift}


def gated(shape, dtype, device="cpu"):
    """Gate and up; a third of the gates where the sigmoid is 0 or 1."""
    gate, up = 3 * randn(*shape, seed=1), randn(*shape, seed=2)
    gate.view(-1)[: gate.numel() // 3] *= 40
    return gate.to(device, dtype), up.to(device, dtype)


def hidden_frames(shape, patch, dtype, device="cpu"):
    """Within and far outside [-1, 1], and exactly between two bytes."""
    hidden = 0.7 * randn(*shape, 3 * patch**2)
    flat = hidden.view(-1)
    flat[::5] *= 1e4
    halves = (torch.arange(256) + 0.5) / 127.5 - 1
    count = min(len(flat[1::5]), 256)
    flat[1::5][:count] = halves[:count]
    return hidden.to(device, dtype)


def frequencies(head_dim, device="cpu"):
    rope = LTX2VideoVaeRotaryPosEmbed3D(head_dim)
    return [rope._inv_freqs(dim, torch.device(device)) for dim in rope.rope_dim_split]


def rotary(frequencies, starts, counts):
    """Of `counts` (T, H, W) positions from `starts` on, in a grid that is longer by one on every axis."""
    grid = [start + count + 1 for start, count in zip(starts, counts, strict=True)]
    return rotary_table(frequencies, grid).part(starts)


def rotated64(x, gain, frequencies, starts, *, eps):
    """Head norm, gain and rotation: pairs of channels as complex numbers. x (B, T, H, W, heads, head_dim)."""
    x = norm64(x, gain, eps=eps)
    angles = []
    for axis, own in enumerate(frequencies):
        first = starts[axis]
        positions = torch.arange(first, first + x.shape[1 + axis], dtype=torch.float32, device=own.device)
        shape = [1, 1, 1, 1, 1, len(own)]
        shape[1 + axis] = len(positions)
        rounded = (positions[:, None] * own).double()  # as the model does
        angles.append(rounded.reshape(shape).expand(*x.shape[:4], 1, len(own)))
    angles = torch.cat(angles, dim=-1)
    turn = torch.polar(torch.ones_like(angles), angles)
    return torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (-1, 2))) * turn).flatten(-2)


class Half:
    """Tokens and weights of half a block, none of them trivial."""

    def __init__(self, grid, channels, units, dtype, *, size=1.0, device="cpu"):
        def some(*shape, seed, factor=1.0):
            return (factor * randn(*shape, seed=seed)).to(device)

        self.x = (size * randn(*grid, channels).clamp(-3, 3)).to(device, dtype)
        self.pending = some(channels, seed=1, factor=size)
        self.gain, self.scale, self.shift = (some(channels, seed=seed) for seed in (2, 3, 4))
        self.norm = (self.gain, (self.scale, self.shift), self.pending)
        self.weights = [some(units, channels, seed=seed, factor=channels**-0.5).to(dtype) for seed in (5, 6)]
        self.bias = some(units, seed=7).to(dtype)
        self.down = some(channels, units, seed=9, factor=2 * size * units**-0.5).to(dtype)

    def applied(self, linear: FoldedLinear, x=None):
        """(x @ weight.T + before) / RMS + after, on the weights as they are rounded."""
        x = (self.x if x is None else x).double()
        rms = ((x + self.pending.double()).square().mean(-1, keepdim=True) + EPS).sqrt()
        return (x @ linear.weight.double().T + linear.before.double()) / rms + linear.after.double()

    def heads(self, into: FoldedLinear, gains, frequencies, starts, head_dim, x=None):
        """Q, K, V."""
        q, k, v = self.applied(into, x).unflatten(-1, (3, -1, head_dim)).unbind(-3)
        turned = (rotated64(y, gain, frequencies, starts, eps=HEAD_EPS) for y, gain in zip((q, k), gains, strict=True))
        return (*turned, v)

    def mlp(self, gate: FoldedLinear, up: FoldedLinear, x=None):
        """x + pending + the gated MLP."""
        x = self.x if x is None else x
        hidden = torch.nn.functional.silu(self.applied(gate, x)) * self.applied(up, x)
        return x.double() + self.pending.double() + hidden @ self.down.double().T
