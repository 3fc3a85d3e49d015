# mypy: disable-error-code="no-untyped-def"
"""Device functions shared by the row and the tile kernel.

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
