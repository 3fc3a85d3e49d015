"""Ring attention: keys and values travel around a ring of ranks, each rank merges attention over one block at a time.

Layouts: q_BSHD, k_BSHD, v_BSHD are this rank's block; every rank's block has the same shape. Padding is not one suffix
of the joined sequence here: each block carries its own count of valid keys.

Why not yunchang's RingComm: TorchDynamo does not trace point-to-point calls (3 graph breaks a ring of two, torch 2.13).
An all-to-all in which each rank sends all it has to its neighbour moves the same bytes, is traced whole, and is as fast
(docs/parallel.md). Tests hold the two against each other.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from layers.collectives import start_all_to_all, wait
from layers.partial_attention import AttendLse, attend_part, merge_pair


def ring_attention(
    attend_lse: AttendLse,
    q_BSHD: torch.Tensor,
    k_BSHD: torch.Tensor,
    v_BSHD: torch.Tensor,
    *,
    valid: Sequence[int],
    group: dist.ProcessGroup,
) -> torch.Tensor:
    """Attention of this rank's queries over the valid keys of every block, (B, S, H, D) in q's dtype.

    valid[i] is the number of real keys at the start of rank i's block. A block without any is passed on, never
    attended. The next block travels while the current one is attended to. Partial results are merged in fp32.
    """
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    block = torch.stack([k_BSHD, v_BSHD])
    merged: tuple[torch.Tensor, torch.Tensor] | None = None
    for step in range(ranks):
        source = (rank - step) % ranks
        pending = _pass_on(block, group) if step + 1 < ranks else None
        if valid[source]:
            part = attend_part(attend_lse, q_BSHD, block[0], block[1], valid=valid[source])
            merged = part if merged is None else merge_pair(*merged, *part)
        if pending is not None:
            block = wait(pending).view(block.shape)
    assert merged is not None, "no block has a valid key"
    return merged[0].to(q_BSHD.dtype)


def _pass_on(block: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Send the block to the next rank of the ring; the pending buffer of the block from the previous one."""
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    send_sizes, receive_sizes = [0] * ranks, [0] * ranks
    send_sizes[(rank + 1) % ranks] = receive_sizes[(rank - 1) % ranks] = block.numel()
    return start_all_to_all(block.flatten(), group, send_sizes=send_sizes, receive_sizes=receive_sizes)


def ring_bytes(*, batch: int, block_tokens: int, heads: int, head_dim: int, ranks: int, itemsize: int) -> int:
    """Bytes a rank sends in one ring attention: K and V of its block, ranks - 1 times."""
    return 2 * (ranks - 1) * batch * block_tokens * heads * head_dim * itemsize
