"""The mesh arithmetic, the split of a sequence, and the refusals; no process group."""

import pytest
import torch

from layers.parallel_state import ParallelState, check_degrees, coordinates_of, shard_length, valid_tokens


@pytest.mark.parametrize(("ulysses", "ring", "replicas"), [(1, 1, 1), (2, 1, 1), (1, 3, 1), (2, 2, 2), (4, 2, 3)])
def test_coordinates_cover_the_mesh_ulysses_innermost(ulysses: int, ring: int, replicas: int) -> None:
    found = [
        coordinates_of(rank, ulysses_degree=ulysses, ring_degree=ring) for rank in range(ulysses * ring * replicas)
    ]
    wanted = [(d, r, u) for d in range(replicas) for r in range(ring) for u in range(ulysses)]
    assert [(c.data_parallel, c.ring, c.ulysses) for c in found] == wanted


def test_sequence_rank_is_the_place_in_the_replica() -> None:
    state = ParallelState(ulysses_degree=2, ring_degree=3, data_parallel_degree=2, rank=10)
    assert (state.data_parallel_rank, state.ring_rank, state.ulysses_rank) == (1, 2, 0)
    assert (state.sequence_rank, state.sequence_degree, state.world_size) == (4, 6, 12)
    assert not state.is_replica_leader
    assert ParallelState(ulysses_degree=2, ring_degree=3, data_parallel_degree=2, rank=6).is_replica_leader


@pytest.mark.parametrize("parts", [1, 2, 3, 4, 7, 8])
@pytest.mark.parametrize("tokens", [1, 2, 3, 7, 8, 9, 1755, 6144])
def test_shards_joined_and_trimmed_are_the_sequence(tokens: int, parts: int) -> None:
    x = torch.randn(2, tokens, 3)
    states = [ParallelState(ulysses_degree=parts, rank=rank) for rank in range(parts)]
    shards = [state.shard(x, dim=1, pad_value=9.0) for state in states]
    assert {shard.shape[1] for shard in shards} == {shard_length(tokens, parts)}
    assert torch.equal(torch.cat(shards, dim=1)[:, :tokens], x)
    for rank, shard in enumerate(shards):
        valid = valid_tokens(tokens, parts, rank)
        assert torch.all(shard[:, valid:] == 9.0) or parts == 1
    assert sum(valid_tokens(tokens, parts, rank) for rank in range(parts)) == tokens


@pytest.mark.parametrize("dim", [0, 1, 2, -1, -2])
def test_shard_along_any_dim_of_a_non_contiguous_tensor(dim: int) -> None:
    x = torch.randn(7, 5, 9).transpose(0, 2)
    shards = [ParallelState(ring_degree=4, rank=rank).shard(x, dim=dim) for rank in range(4)]
    assert torch.equal(torch.cat(shards, dim=dim).narrow(dim, 0, x.shape[dim]), x)


def test_one_process_costs_nothing() -> None:
    state, x = ParallelState(), torch.randn(1, 5, 3)
    assert state.shard(x, dim=1) is x
    assert state.gather(x, dim=1, length=5) is x


@pytest.mark.parametrize(
    ("degrees", "says"),
    [
        ({"world_size": 4, "ulysses_degree": 2}, "= 2, but 4 processes were started"),
        ({"world_size": 4, "ulysses_degree": 2}, "4 x 1, 2 x 2, 1 x 4"),
        (
            {"world_size": 6, "ulysses_degree": 6, "ring_degree": 2, "num_heads": 32},
            "--ulysses_degree 6 does not divide",
        ),
        ({"world_size": 6, "num_heads": 32}, "2 x 3, 1 x 6"),
        ({"world_size": 1, "ring_degree": 2}, "torchrun --nproc_per_node"),
        ({"world_size": 2, "ring_degree": 0}, "--ring_degree 0 must be at least 1"),
        ({"world_size": 3, "ulysses_degree": 3, "num_heads": 32}, "1, 2, 4, 8, 16, 32"),
        ({"world_size": 2, "data_parallel_degree": 4}, "--data_parallel_degree 4 = 4"),
    ],
)
def test_degrees_that_do_not_fit_are_refused(degrees: dict[str, int], says: str) -> None:
    with pytest.raises(ValueError, match="--") as refused:
        check_degrees(**degrees)
    assert says in str(refused.value)


@pytest.mark.parametrize("degrees", [(1, 1, 1), (2, 2, 2), (8, 1, 1), (1, 8, 1), (1, 1, 8)])
def test_degrees_that_fit_pass(degrees: tuple[int, int, int]) -> None:
    ulysses, ring, replicas = degrees
    check_degrees(
        world_size=ulysses * ring * replicas,
        ulysses_degree=ulysses,
        ring_degree=ring,
        data_parallel_degree=replicas,
        num_heads=32,
    )
