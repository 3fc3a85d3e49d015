# mypy: disable-error-code="no-untyped-def"
"""What the kernels share.

Positions are cells of the k, v tensors: a caller folds kv_start into the numbers of an axis tuple
(q_offset, q_len, kv_len, lowest, highest): the position of the first query, how many queries and keys there are, and
the range that window starts are shifted into. Scores are kept in log2 units: p = 2**(score * log2(e)).
"""

import triton
import triton.language as tl

# Scalar arguments that never specialise a kernel: another grid must not compile it again. A tuple argument would.
GEOMETRY = [f"{axis}_{what}" for axis in "thw" for what in ("offset", "queries", "keys", "lowest", "highest")]
LOG2E = tl.constexpr(1.4426950408889634)
HIDDEN = tl.constexpr(-1e30)  # added to a score of a key outside the window; 2**HIDDEN is 0


def block_name(proxy) -> str:
    """Blocks and kernel size of a tile kernel, for its name in a profile."""
    c = proxy.constants
    return f"{c['QT']}x{c['QH']}x{c['QW']}_kv{c['BLOCK_KV']}_k{c['KT']}x{c['KH']}x{c['KW']}"


@triton.jit
def window_start(position, axis, KERNEL: tl.constexpr):
    """First key that a query at `position` sees."""
    return tl.minimum(tl.maximum(position - KERNEL // 2, axis[3]), axis[4])


@triton.jit
def online_softmax(s, m, l, acc, v):
    """One block of scores `s` (log2 units) into the running maximum m, row sum l and accumulator acc."""
    m_new = tl.maximum(m, tl.max(s, 1))
    shrink = tl.exp2(m - m_new)
    p = tl.exp2(s - m_new[:, None])
    return m_new, l * shrink + tl.sum(p, 1), tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")


def _jump_over_hidden_rows(pack: int) -> tuple[str, str]:
    """PTX for 2**(s * log2(e) - shift) of `pack` scores of one thread, all 0 without an exponential if hidden != 0.

    The scores of a warp lie in one T plane of queries, so a warp whose windows miss the key plane jumps: 4 % on H200.
    """
    lines = ["{", ".reg .pred hidden;", ".reg .f32 t;", f"setp.ne.f32 hidden, ${3 * pack}, 0f00000000;"]
    lines += ["@!hidden bra SEEN;", *(f"mov.b32 ${i}, 0;" for i in range(pack)), "bra DONE;", "SEEN:"]
    for i in range(pack):
        lines.append(f"fma.rn.f32 t, ${pack + i}, 0f3FB8AA3B, ${2 * pack + i};")  # log2(e)
        lines.append(f"ex2.approx.ftz.f32 ${i}, t;")
    return "\n".join([*lines, "DONE:", "}"]), ",".join(["=f"] * pack + ["f"] * (3 * pack))


_PTX_16, _CONSTRAINTS_16 = (tl.constexpr(x) for x in _jump_over_hidden_rows(16))
_PTX_32, _CONSTRAINTS_32 = (tl.constexpr(x) for x in _jump_over_hidden_rows(32))


@triton.jit
def probabilities(s, shift, seen, SKIP_EXP: tl.constexpr):
    """2**(s * log2(e) - shift), and 0 in rows that are not `seen`; SKIP_EXP: scores per thread, or 0 for no PTX."""
    if SKIP_EXP > 0:
        PTX: tl.constexpr = _PTX_16 if SKIP_EXP == 16 else _PTX_32
        CONSTRAINTS: tl.constexpr = _CONSTRAINTS_16 if SKIP_EXP == 16 else _CONSTRAINTS_32
        hidden = tl.where(seen, 0.0, 1.0)[:, None]
        p = tl.inline_asm_elementwise(PTX, CONSTRAINTS, [s, -shift, hidden], tl.float32, is_pure=True, pack=SKIP_EXP)
    else:
        p = tl.exp2(s * LOG2E + (tl.where(seen, 0.0, HIDDEN) - shift)[:, None])
    return p


@triton.jit
def union(q0, axis, BLOCK: tl.constexpr, KERNEL: tl.constexpr):
    """First key of the union of the windows of queries q0 .. q0 + BLOCK, and how many keys it has."""
    first = window_start(axis[0] + q0, axis, KERNEL)
    last = window_start(axis[0] + tl.minimum(q0 + BLOCK, axis[1]) - 1, axis, KERNEL)
    return first, last + KERNEL - first


@triton.jit
def cell_offsets(b, head, t, h, w, strides):
    """Element offsets of cells, in 64 bits."""
    cell = tl.cast(t, tl.int64) * strides[1] + tl.cast(h, tl.int64) * strides[2] + tl.cast(w, tl.int64) * strides[3]
    return b * strides[0] + head * strides[4] + cell


@triton.jit
def key_offsets(key_h, key_w, room_h, room_w, strides, WIDE: tl.constexpr):
    """Offsets of (h, w) cells of the union from its first cell; cells beyond the keys repeat the last one."""
    OFFSET: tl.constexpr = tl.int64 if WIDE else tl.int32
    h = tl.cast(tl.minimum(key_h, room_h), OFFSET)
    w = tl.cast(tl.minimum(key_w, room_w), OFFSET)
    return h * tl.cast(strides[2], OFFSET) + w * tl.cast(strides[3], OFFSET)
