"""The three collectives that the layers use, split into a start and a wait so that work can go on between them.

These are torch's functional collective operators, called without the wrappers of _functional_collectives: the wrappers
wait at once where torch.compile traces them, which leaves nothing to overlap, and torch 2.11 and 2.13 disagree about
their names. An operator's input may be freed while it runs; its output may be read only after wait().
"""

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives  # gives the operators the shapes that tracing needs

_ops = torch.ops._c10d_functional


def start_all_to_all(
    x: torch.Tensor,
    group: dist.ProcessGroup,
    *,
    send_sizes: list[int] | None = None,
    receive_sizes: list[int] | None = None,
) -> torch.Tensor:
    """Send slices of dim 0 of the contiguous x to each rank; by default equal ones. The pending result."""
    if send_sizes is None or receive_sizes is None:
        ranks = dist.get_world_size(group)
        send_sizes = receive_sizes = [x.shape[0] // ranks] * ranks
    pending: torch.Tensor = _ops.all_to_all_single(x, receive_sizes, send_sizes, group.group_name)
    return pending


def start_all_gather(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Every rank's contiguous x, joined along dim 0 in rank order; all of the same shape. The pending result."""
    pending: torch.Tensor = _ops.all_gather_into_tensor(x, dist.get_world_size(group), group.group_name)
    return pending


def wait(pending: torch.Tensor) -> torch.Tensor:
    """The result, ready to be read (on a GPU: by what is queued after this call)."""
    ready: torch.Tensor = _ops.wait_tensor(pending)
    return ready
