"""The fused ops as tests run them in a worker process, their outputs poisoned with NaN: see conftest.py of tests/unit.

Tensors (B, T, H, W, C) that are to be a slice of frames of a longer tensor are moved into one here, and what lies
around them is looked at afterwards.
"""

import functools
import math

import torch
from fused_cases import rotary

from layers.fused import heads, launch, narrow, pixels, tokens


def poisoned(op):
    """torch.empty fills with NaN, and bytes with 255, while `op` runs."""

    @functools.wraps(op)
    def run(*args, **kwargs):
        torch.set_num_threads(1)
        torch.use_deterministic_algorithms(True)
        try:
            return op(*args, **kwargs)
        finally:
            torch.use_deterministic_algorithms(False)

    return run


class Place:
    """A part of `shape` of a larger buffer full of `fill`: the whole of it, or all but three frames, rows or columns on
    either side, or the whole with heads before T. What an op changes in place is surrounded by numbers, for it would
    turn NaN into NaN."""

    def __init__(self, shape, like: torch.Tensor, where: str, fill: float = float("nan")) -> None:
        """`like` says dtype and device."""
        dim = {"frames": 1, "rows": 2, "columns": 3}.get(where)
        whole = list(shape)
        if dim is not None:
            whole[dim] += 6
        self.fill, self.buffer = fill, like.new_full(whole, fill)
        self.part = self.buffer if dim is None else self.buffer.narrow(dim, 3, shape[dim])
        if where == "heads first":
            self.part = self.buffer.transpose(1, 4).contiguous().transpose(1, 4)

    def taken(self) -> torch.Tensor:
        """A copy of the part; what is around it must be as it was."""
        copy = self.part.clone()
        self.part.fill_(self.fill)
        untouched = self.buffer.isnan() if math.isnan(self.fill) else self.buffer == self.fill
        assert untouched.all(), "written outside the output"
        return copy


def placed(x: torch.Tensor, where: str, fill: float = float("nan")) -> Place:
    place = Place(x.shape, x, where, fill)
    place.part.copy_(x)
    return place


@poisoned
def rms_norm(x, gain, *, where="dense", **options):
    return tokens.rms_norm(placed(x, where).part, gain, **options)


@poisoned
def add_rms_norm(x, y, gain, *, where="dense", **options):
    """The sum that is left in x, and its norm."""
    x = placed(x, where, 7.0)
    normed = tokens.add_rms_norm_(x.part, y, gain, **options)
    return x.taken(), normed


@poisoned
def silu_mul(gate, up):
    found = tokens.silu_mul_(gate, up)
    assert found is gate
    return found


@poisoned
def patches_to_bytes(hidden, patch):
    return pixels.patches_to_bytes(hidden, patch)


@poisoned
def norm_rotate_heads(qkv, gains, frequencies, starts, *, eps, head_dim, where):
    """Q, K, V. `where`: K and V lie in larger buffers, or all three over qkv itself ("in place")."""
    angles = rotary(frequencies, starts, qkv.shape[1:4])
    norms = heads.HeadNorms(gains, eps)
    shape = (*qkv.shape[:4], qkv.shape[4] // (3 * head_dim), head_dim)
    if where == "in place":
        own = placed(qkv, "frames", 7.0)
        out = own.part.unflatten(-1, (3, *shape[4:])).unbind(-3)
        heads.norm_rotate_heads(own.part, norms, angles, out=out)
        q, k, v = own.taken().unflatten(-1, (3, *shape[4:])).unbind(-3)
        return q, k, v
    places = [Place(shape, qkv, w) for w in ("dense", where, where)]
    heads.norm_rotate_heads(placed(qkv, "frames").part, norms, angles, out=tuple(p.part for p in places))
    return tuple(p.taken() for p in places)


def heads_of(qkv, frequencies, *, strided=False):
    """Two heads of 16 of qkv as it is; `strided`: every second channel of an output is another tensor's."""
    angles = rotary(frequencies, (0, 0, 0), qkv.shape[1:4])
    shape = (*qkv.shape[:4], 2, 16)
    out = tuple(torch.empty(*shape, 2)[..., 0] if strided else torch.empty(shape) for _ in range(3))
    heads.norm_rotate_heads(qkv, heads.HeadNorms(torch.ones(2, 16), 1e-6), angles, out=out)


@poisoned
def project_heads(x, pending, into, gains, frequencies, starts, *, eps, head_eps, head_dim, where):
    """Q, K, V; x lies in a longer tensor, K and V in larger buffers."""
    angles = rotary(frequencies, starts, x.shape[1:4])
    shape = (*x.shape[:4], into.weight.shape[0] // (3 * head_dim), head_dim)
    places = [Place(shape, x, w) for w in ("dense", where, where)]
    narrow.project_heads(
        placed(x, "frames").part, pending, into, heads.HeadNorms(gains, head_eps), angles, eps=eps,
        out=tuple(p.part for p in places),
    )  # fmt: skip
    return tuple(p.taken() for p in places)


@poisoned
def gated_mlp(x, pending, gate, up, w_down, *, eps):
    """x afterwards; it lies in a longer tensor."""
    place = placed(x, "frames", 7.0)
    found = narrow.gated_mlp_(place.part, pending, narrow.pack_mlp(gate, up, w_down), eps=eps)
    assert found is place.part
    return place.taken()


def serves(channels, dtype, *, hidden, head_dim):
    return narrow.serves(torch.empty(1, channels, dtype=dtype), hidden=hidden, head_dim=head_dim)


def is_interpreted():
    return launch.interpreted()


def half_of_tokens_with_gaps(which):
    """Either half called with rows taken out of a larger tensor, or with outputs of strided channels."""
    x = torch.empty(1, 2, 3, 5, 32)
    pending, linear = torch.zeros(32), narrow.FoldedLinear(torch.zeros(96, 32), torch.zeros(96), torch.zeros(96))
    gaps = torch.empty(1, 2, 9, 5, 32)[:, :, 3:6]
    if which == "mlp":
        narrow.gated_mlp_(gaps, pending, narrow.pack_mlp(linear, linear, torch.zeros(32, 96)), eps=1e-6)
        return
    out = torch.empty(1, 2, 3, 5, 2, 16, 2)[..., 0] if which == "strided heads" else torch.empty(1, 2, 3, 5, 2, 16)
    angles = heads.Rotary(torch.zeros(2, 10, 8), (2, 3, 3), (0, 2, 5))
    norms = heads.HeadNorms(torch.zeros(2, 16), 1e-6)
    x = x if which == "strided heads" else gaps
    narrow.project_heads(x, pending, linear, norms, angles, eps=1e-6, out=(out, out, out))
