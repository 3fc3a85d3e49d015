"""What runs on the ranks of test_sequence_attention: our all-to-alls and ring against yunchang's and one process."""

import os
from datetime import timedelta
from typing import Any

import torch
from yunchang.comm.all_to_all import SeqAllToAll4D
from yunchang.ring.utils import RingComm, update_out_and_lse

from layers.attention_backends import default_backend
from layers.parallel_state import ParallelState
from layers.ring import ring_attention
from layers.ulysses import finish_scatter_heads, gather_heads, start_scatter_heads
from runner.distributed import start


def reference(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    scores = torch.einsum("bqhd,bkhd->bhqk", q.double(), k.double()) * q.shape[-1] ** -0.5
    return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v.double()).float()


def check_ulysses(dtype: torch.dtype) -> dict[str, Any]:
    world, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    with start(ulysses_degree=world, timeout=timedelta(seconds=60)) as session:
        group = session.state.ulysses_group
        assert group is not None
        torch.manual_seed(0)
        whole = torch.randn(2, 5 * world, 3 * world, 4).to(dtype)
        shard = session.state.shard(whole, dim=1).transpose(0, 1).contiguous().transpose(0, 1)  # not contiguous
        scattered = finish_scatter_heads(start_scatter_heads(shard, group))
        back = gather_heads(scattered, group)
        return {
            "scatter": torch.equal(scattered, whole[:, :, 3 * rank : 3 * rank + 3]),
            "scatter_as_yunchang": torch.equal(scattered, SeqAllToAll4D.apply(group, shard.contiguous(), 2, 1)),
            "back": torch.equal(back, shard),
            "back_as_yunchang": torch.equal(back, SeqAllToAll4D.apply(group, scattered.contiguous(), 1, 2)),
            "back_is_contiguous": back.is_contiguous(),
        }


def check_ring(tokens: int) -> dict[str, float]:
    """Largest error over every rank's valid queries, with padding of 1e4 and with it attended; and yunchang's ring."""
    with start(ring_degree=int(os.environ["WORLD_SIZE"]), timeout=timedelta(seconds=60)) as session:
        state = session.state
        group, attend_lse = state.ring_group, default_backend(state.device, torch.float32).attend_lse
        assert group is not None
        assert attend_lse is not None
        torch.manual_seed(0)
        q, k, v = (torch.randn(2, tokens, 3, 16) for _ in range(3))
        wanted = reference(q, k, v)
        shards = [state.shard(x, dim=1, pad_value=1e4) for x in (q, k, v)]
        block = shards[0].shape[1]
        valid = [min(max(tokens - r * block, 0), block) for r in range(state.ring_degree)]
        found = {}
        for name, counts in (("ours", valid), ("padding attended", [block] * state.ring_degree)):
            out = ring_attention(attend_lse, *shards, valid=counts, group=group)
            found[name] = float((state.gather(out, dim=1, length=tokens) - wanted).abs().max())
        if tokens % state.ring_degree == 0:
            out = _yunchang_ring(attend_lse, *shards, state)
            found["yunchang"] = float((state.gather(out, dim=1, length=tokens) - wanted).abs().max())
        return found


def _yunchang_ring(
    attend_lse: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, state: ParallelState
) -> torch.Tensor:
    comm = RingComm(state.ring_group)
    out = lse = None
    for step in range(state.ring_degree):
        if step + 1 < state.ring_degree:
            next_k, next_v = comm.send_recv(k.contiguous()), comm.send_recv(v.contiguous())
            comm.commit()
        out, lse = update_out_and_lse(out, lse, *attend_lse(q, k, v))
        if step + 1 < state.ring_degree:
            comm.wait()
            k, v = next_k, next_v
    assert out is not None
    return out
