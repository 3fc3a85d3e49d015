"""Ulysses: an all-to-all turns "some tokens, all heads" into "all tokens, some heads", and back (Jacobs et al., 2023).

Layouts: x_BSHD holds this rank's S tokens and all H heads; x_BTHD holds the group's T = U * S tokens, in rank order,
and this rank's H / U heads. Pending buffers are rank-major, tokens before batch: (U, S, B, H / U, D), so that joining
the ranks' tokens is a view.

Why not yunchang's SeqAllToAll4D: torch 2.13 traces both without a graph break (2 gloo ranks, CPU), but yunchang's
waits inside each call and copies the received tensor once more. Here V and K travel while Q is being computed, and
the send-side copy fuses with RoPE under torch.compile. Tests hold the two against each other (docs/parallel.md).
"""

import torch
import torch.distributed as dist

from layers.collectives import start_all_to_all, wait


def start_scatter_heads(x_BSHD: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Send each rank its heads of this rank's tokens. Returns the pending buffer for finish_scatter_heads.

    H must divide by the group's size (checked before weights load by check_degrees).
    """
    ranks = dist.get_world_size(group)
    send = x_BSHD.unflatten(2, (ranks, -1)).permute(2, 1, 0, 3, 4).contiguous()
    return start_all_to_all(send, group)


def finish_scatter_heads(pending: torch.Tensor) -> torch.Tensor:
    """The received tokens of the whole group, x_BTHD: a view that is contiguous for a batch of one."""
    return wait(pending).flatten(0, 1).transpose(0, 1)


def gather_heads(x_BTHD: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Send each rank its tokens of this rank's heads: the inverse of the scatter, back to x_BSHD (contiguous)."""
    ranks = dist.get_world_size(group)
    send = x_BTHD.transpose(0, 1).unflatten(0, (ranks, -1)).contiguous()
    return wait(start_all_to_all(send, group)).permute(2, 1, 0, 3, 4).flatten(2, 3)


def all_to_all_bytes(*, batch: int, shard_tokens: int, heads: int, head_dim: int, ranks: int, itemsize: int) -> int:
    """Bytes one all-to-all sends from a rank to the others; its own part stays."""
    return batch * shard_tokens * heads * head_dim * itemsize * (ranks - 1) // ranks
