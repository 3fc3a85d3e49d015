"""Attention over parts of the keys, merged, against attention over all of them; and the payload of the merge."""

import pytest
import torch
from yunchang.ring.utils import update_out_and_lse

from layers.attention_backends import default_backend
from layers.partial_attention import attend_part, merge_pair, merge_parts, partial_attention_bytes

# fp32, rounding of sums in another order; a wrong weight gives above 1e-2.
TOLERANCE = 5e-6

ATTEND_LSE = default_backend(torch.device("cpu"), torch.float32).attend_lse
assert ATTEND_LSE is not None


def reference(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    scores = torch.einsum("bqhd,bkhd->bhqk", q.double(), k.double()) * q.shape[-1] ** -0.5
    return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v.double()).float()


def problem(queries: int, keys: int, *, scale: float = 1.0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    q, k, v = torch.randn(2, queries, 3, 16), torch.randn(2, keys, 3, 16), torch.randn(2, keys, 3, 16)
    return q * scale, k, v


def parts_of(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sizes: list[int], pad: int) -> list[tuple]:
    """Each part padded by `pad` keys that would change everything if they were attended."""
    found = []
    for part_k, part_v in zip(k.split(sizes, 1), v.split(sizes, 1), strict=True):
        padding = torch.full((2, pad, 3, 16), 1e4)
        padded_k, padded_v = torch.cat([part_k, padding], 1), torch.cat([part_v, padding], 1)
        found.append(attend_part(ATTEND_LSE, q, padded_k, padded_v, valid=part_k.shape[1]))
    return found


SIZES = [pytest.param(sizes, id="-".join(map(str, sizes))) for sizes in ([11], [4, 7], [0, 11], [1, 0, 10, 0], [3] * 5)]


@pytest.mark.parametrize("scale", [1.0, 30.0], ids=["plain", "large scores"])
@pytest.mark.parametrize("queries", [1, 5])
@pytest.mark.parametrize("sizes", SIZES)
def test_merged_parts_are_the_whole(sizes: list[int], queries: int, scale: float) -> None:
    q, k, v = problem(queries, sum(sizes), scale=scale)
    parts = parts_of(q, k, v, sizes, pad=2)
    merged = merge_parts(torch.stack([o for o, _ in parts]), torch.stack([lse for _, lse in parts]))
    assert (merged - reference(q, k, v)).abs().max() < TOLERANCE * max(1.0, scale)


@pytest.mark.parametrize("sizes", SIZES)
def test_pairs_merged_one_by_one_are_the_whole_and_yunchangs(sizes: list[int]) -> None:
    q, k, v = problem(5, sum(sizes))
    parts = [part for part, size in zip(parts_of(q, k, v, sizes, pad=1), sizes, strict=True) if size]
    merged, out, out_lse = parts[0], None, None
    for part in parts:
        out, out_lse = update_out_and_lse(out, out_lse, *part)
        merged = merge_pair(*merged, *part) if part is not parts[0] else merged
    assert (merged[0] - reference(q, k, v)).abs().max() < TOLERANCE
    assert (merged[0] - out).abs().max() < TOLERANCE


def test_an_empty_part_changes_no_bit() -> None:
    q, k, v = problem(5, 7)
    full = attend_part(ATTEND_LSE, q, k, v, valid=7)
    empty = attend_part(ATTEND_LSE, q, k, v, valid=0)
    assert torch.all(empty[1] == -torch.inf)
    assert torch.all(empty[0] == 0)
    for pair in ((full, empty), (empty, full)):
        assert torch.equal(merge_pair(*pair[0], *pair[1])[0], full[0])
        assert torch.equal(merge_parts(torch.stack([p[0] for p in pair]), torch.stack([p[1] for p in pair])), full[0])


def test_a_wrong_weight_would_be_seen() -> None:
    q, k, v = problem(5, 11)
    parts = parts_of(q, k, v, [4, 7], pad=0)
    unweighted = merge_parts(torch.stack([o for o, _ in parts]), torch.zeros(2, 2, 3, 5))
    assert (unweighted - reference(q, k, v)).abs().max() > 1e-2


def test_payload_at_production_sizes() -> None:
    """126 audio tokens, 32 heads x 64; K and V of 24,576 tokens on 8 ranks, bf16, next to it."""
    assert partial_attention_bytes(batch=1, queries=126, heads=32, head_dim=64) == 1_048_320
    keys_and_values = 2 * (24_576 // 8) * 32 * 64 * 2
    assert keys_and_values == 25_165_824
    assert 8 * keys_and_values == 201_326_592
