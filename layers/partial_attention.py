"""Attention over a part of the keys, and the merge of such parts into attention over all of them.

With s_p the scores over part p, lse_p = log sum exp(s_p) and o_p = softmax(s_p) v_p, attention over every part is
sum_p exp(lse_p - lse) o_p with lse = log sum_p exp(lse_p): the streaming softmax of Milakov and Gimelshein (2018), as
Ring Attention (Liu et al., 2023) uses it between ranks. A part without keys is o = 0, lse = -inf.

Layouts: q, k, v, o are (B, S, H, D), tokens before heads; lse is (B, H, S) in fp32, natural logarithm.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist

from layers.collectives import start_all_gather, wait

AttendLse = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def attend_part(
    attend_lse: AttendLse, q_BSHD: torch.Tensor, k_BSHD: torch.Tensor, v_BSHD: torch.Tensor, *, valid: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of q over the first `valid` keys: (o, lse), both fp32.

    Without a key no kernel is called: aten's CPU flash attention dies of a division by zero there.
    """
    if valid == 0:
        batch, queries, heads, _ = q_BSHD.shape
        o = torch.zeros((*q_BSHD.shape[:3], v_BSHD.shape[3]), dtype=torch.float32, device=q_BSHD.device)
        return o, torch.full((batch, heads, queries), -torch.inf, dtype=torch.float32, device=q_BSHD.device)
    o, lse = attend_lse(q_BSHD, k_BSHD[:, :valid], v_BSHD[:, :valid])
    return o.float(), lse


def merge_pair(
    o_a: torch.Tensor, lse_a: torch.Tensor, o_b: torch.Tensor, lse_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge two parts, fp32. Either may be empty, not both at one query (the result would be NaN)."""
    lse = torch.logaddexp(lse_a, lse_b)
    weight_a, weight_b = (torch.exp(part - lse).transpose(1, 2).unsqueeze(-1) for part in (lse_a, lse_b))
    return o_a * weight_a + o_b * weight_b, lse


def merge_parts(o_PBSHD: torch.Tensor, lse_PBHS: torch.Tensor) -> torch.Tensor:
    """Merge P parts, fp32, summed in the order of P so that every rank that merges the same parts gets the same bits.

    At least one part has keys.
    """
    top = lse_PBHS.amax(dim=0)
    weights = torch.exp(lse_PBHS - top)
    total = weights[0]
    merged = o_PBSHD[0] * weights[0].transpose(1, 2).unsqueeze(-1)
    for part in range(1, weights.shape[0]):
        total = total + weights[part]
        merged = merged + o_PBSHD[part] * weights[part].transpose(1, 2).unsqueeze(-1)
    return merged / total.transpose(1, 2).unsqueeze(-1)


def all_gather_parts(
    o_BSHD: torch.Tensor, lse_BHS: torch.Tensor, group: dist.ProcessGroup
) -> tuple[torch.Tensor, torch.Tensor]:
    """Every rank's (o, lse) in rank order, (P, B, S, H, D) and (P, B, H, S), in one collective.

    A rank contributes 4 * B * S * H * (D + 1) bytes: see partial_attention_bytes.
    """
    packed = torch.cat([o_BSHD, lse_BHS.transpose(1, 2).unsqueeze(-1)], dim=-1).contiguous()
    gathered = wait(start_all_gather(packed, group)).unflatten(0, (dist.get_world_size(group), -1))
    return gathered[..., :-1], gathered[..., -1].transpose(2, 3)


def partial_attention_bytes(*, batch: int, queries: int, heads: int, head_dim: int) -> int:
    """Bytes a rank contributes to the merge: o and lse of its part, in fp32."""
    return 4 * batch * queries * heads * (head_dim + 1)
