"""Who computes what: the degrees of parallelism, this process's place in them, and how a sequence is split.

A world of N = ulysses_degree * ring_degree * data_parallel_degree ranks is laid out as yunchang's set_seq_parallel_pg
lays it out: rank = (data_parallel_rank * ring_degree + ring_rank) * ulysses_degree + ulysses_rank. A replica's
sequence-parallel ranks are thus neighbours, and its Ulysses group is the innermost one (the fastest links).

A sequence of L tokens is split into equal shards of ceil(L / parts), padded at the end; shard i belongs to
sequence-parallel rank i. Only the last shards hold padding, and some may hold nothing else.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from layers.collectives import start_all_gather, wait


@dataclass(frozen=True)
class Coordinates:
    """A rank's place along the three axes of the mesh."""

    data_parallel: int
    ring: int
    ulysses: int


def coordinates_of(rank: int, *, ulysses_degree: int, ring_degree: int) -> Coordinates:
    """The mesh coordinates of a global rank; pure arithmetic, no process group."""
    replica, sequence_rank = divmod(rank, ulysses_degree * ring_degree)
    ring, ulysses = divmod(sequence_rank, ulysses_degree)
    return Coordinates(data_parallel=replica, ring=ring, ulysses=ulysses)


def shard_length(num_tokens: int, parts: int) -> int:
    """Tokens per shard, padding included: ceil(num_tokens / parts)."""
    return -(-num_tokens // parts)


def valid_tokens(num_tokens: int, parts: int, part: int) -> int:
    """How many tokens of shard `part` are real; the others, at its end, are padding. May be 0."""
    length = shard_length(num_tokens, parts)
    return min(max(num_tokens - part * length, 0), length)


def check_degrees(
    *,
    world_size: int,
    ulysses_degree: int = 1,
    ring_degree: int = 1,
    data_parallel_degree: int = 1,
    num_heads: int | None = None,
) -> None:
    """Refuse degrees that do not multiply to the world size, or a Ulysses degree that does not divide the heads.

    Raises ValueError naming the flags, their values, and degrees that work on this world size.
    """
    degrees = {
        "--ulysses_degree": ulysses_degree,
        "--ring_degree": ring_degree,
        "--data_parallel_degree": data_parallel_degree,
    }
    for flag, degree in degrees.items():
        if degree < 1:
            raise ValueError(f"{flag} {degree} must be at least 1.")
    if num_heads is not None and num_heads % ulysses_degree:
        divisors = ", ".join(str(d) for d in range(1, num_heads + 1) if num_heads % d == 0)
        raise ValueError(
            f"--ulysses_degree {ulysses_degree} does not divide the model's {num_heads} attention heads; "
            f"it may be {divisors}; the rest of the ranks can go to --ring_degree."
        )
    product = ulysses_degree * ring_degree * data_parallel_degree
    if product != world_size:
        raise ValueError(
            f"--ulysses_degree {ulysses_degree} x --ring_degree {ring_degree} x --data_parallel_degree "
            f"{data_parallel_degree} = {product}, but {_count(world_size)} started; {_working(world_size, num_heads)}"
        )


def _count(world_size: int) -> str:
    return "1 process was" if world_size == 1 else f"{world_size} processes were"


def _working(world_size: int, num_heads: int | None) -> str:
    if world_size == 1:
        return "for more, start it with torchrun --nproc_per_node=N."
    pairs = [
        f"{u} x {world_size // u}"
        for u in range(world_size, 0, -1)
        if world_size % u == 0 and (num_heads is None or num_heads % u == 0)
    ]
    return f"ulysses x ring that work with data parallel 1: {', '.join(pairs)}."


@dataclass(frozen=True)
class ParallelState:
    """Degrees, ranks and process groups of this process. The default is one process: no group, no communication.

    A group is None where its degree is 1. `device` is where tensors to communicate live. Built by the runner; passed
    as an argument to whatever communicates.
    """

    ulysses_degree: int = 1
    ring_degree: int = 1
    data_parallel_degree: int = 1
    rank: int = 0
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    ulysses_group: dist.ProcessGroup | None = None
    ring_group: dist.ProcessGroup | None = None
    sequence_group: dist.ProcessGroup | None = None
    data_parallel_group: dist.ProcessGroup | None = None

    @property
    def world_size(self) -> int:
        return self.sequence_degree * self.data_parallel_degree

    @property
    def sequence_degree(self) -> int:
        """Ranks that share one sequence: ulysses_degree * ring_degree."""
        return self.ulysses_degree * self.ring_degree

    @property
    def coordinates(self) -> Coordinates:
        return coordinates_of(self.rank, ulysses_degree=self.ulysses_degree, ring_degree=self.ring_degree)

    @property
    def ulysses_rank(self) -> int:
        return self.coordinates.ulysses

    @property
    def ring_rank(self) -> int:
        return self.coordinates.ring

    @property
    def data_parallel_rank(self) -> int:
        return self.coordinates.data_parallel

    @property
    def sequence_rank(self) -> int:
        """This process's shard: ring_rank * ulysses_degree + ulysses_rank."""
        return self.rank % self.sequence_degree

    @property
    def is_replica_leader(self) -> bool:
        """True on the one rank of each data-parallel replica that saves its files."""
        return self.sequence_rank == 0

    def shard(self, x: torch.Tensor, *, dim: int, pad_value: float = 0.0) -> torch.Tensor:
        """This rank's shard of x along `dim`: ceil(L / sequence_degree) long, padded at the end with pad_value.

        The shard is a view where it holds no padding.
        """
        if self.sequence_degree == 1:
            return x
        total = x.shape[dim]
        length = shard_length(total, self.sequence_degree)
        valid = valid_tokens(total, self.sequence_degree, self.sequence_rank)
        start = min(self.sequence_rank * length, total)
        own = x.narrow(dim, start, valid)
        if valid == length:
            return own
        after_dim = [0, 0] * (x.ndim - 1 - dim % x.ndim)
        return F.pad(own, [*after_dim, 0, length - valid], value=pad_value)

    def gather(self, x: torch.Tensor, *, dim: int, length: int) -> torch.Tensor:
        """The inverse of shard: every rank's x joined along `dim` in rank order, the padding beyond `length` dropped.

        Collective over the sequence group; every rank's x has the same shape, dtype and device.
        """
        if self.sequence_degree == 1:
            return x
        assert self.sequence_group is not None
        joined = wait(start_all_gather(x.movedim(dim, 0).contiguous(), self.sequence_group))
        return joined[:length].movedim(0, dim)

    def all_gather_object(self, value: Any) -> list[Any]:
        """Every rank's value (small and picklable), in rank order, on every rank of the world."""
        values = [value]
        for degree, group in (
            (self.sequence_degree, self.sequence_group),
            (self.data_parallel_degree, self.data_parallel_group),
        ):
            if degree > 1:
                received: list[Any] = [None] * degree
                dist.all_gather_object(received, values, group=group)
                values = [item for part in received for item in part]
        return values
