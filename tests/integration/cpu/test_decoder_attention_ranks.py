"""All ranks take the same attention, whichever of them can do less, and say which rank that was."""

import pytest
from decoder_attention_cases import choose_where_ranks_differ
from ranks import run_ranks

NOT_INSTALLED = "not installed (pip install natten, or see docs/backends.md)"


@pytest.mark.parametrize(
    ("world", "degrees"),
    [
        pytest.param(2, {"ulysses_degree": 2}, id="2-ranks"),
        pytest.param(4, {"ulysses_degree": 2, "data_parallel_degree": 2}, id="2-replicas-of-2"),
    ],
)
def test_a_rank_without_the_package(world: int, degrees: dict[str, int]) -> None:
    found = run_ranks(choose_where_ranks_differ, world, "auto", "nothing", degrees)
    assert [each["rank"] for each in found] == list(range(world))
    reason = f"on rank {world - 1}: {NOT_INSTALLED}"
    for each in found:
        assert each["error"] is None
        assert each["chosen"]["used"] == "sdpa"
        assert each["chosen"]["refused"]["natten"] == reason
        assert each["lines"][0] == f"decoder attention: natten refused: {reason}"
        assert each["chosen"]["calls"] == sum(range(1, world + 1))
        assert each["chosen"] == found[0]["chosen"]


def test_a_rank_on_which_it_is_wrong() -> None:
    found = run_ranks(choose_where_ranks_differ, 2, "auto", "wrong", {"ulysses_degree": 2})
    for each in found:
        assert each["chosen"]["used"] == "sdpa"
        assert each["chosen"]["refused"]["natten"].startswith(
            "on rank 1: its self-test at kernel (3, 3, 3) is wrong: relative error "
        )


def test_a_named_one_that_a_rank_lacks_is_an_error_on_all() -> None:
    found = run_ranks(choose_where_ranks_differ, 2, "natten", "nothing", {"ulysses_degree": 2})
    for each in found:
        assert each["error"] == (
            f"--decoder_attention natten cannot be used here: on rank 1: {NOT_INSTALLED}. Leave it out, or give auto, "
            "to take the best that can."
        )


@pytest.mark.parametrize("requested", ["auto", "fastest"])
def test_ranks_that_have_the_same(requested: str) -> None:
    found = run_ranks(choose_where_ranks_differ, 2, requested, "the same", {"ulysses_degree": 2})
    for each in found:
        assert each["chosen"] == found[0]["chosen"], "figures measured on both ranks give both the same choice"
        assert "natten" not in each["chosen"]["refused"]
        assert bool(each["chosen"]["measured_milliseconds"]) == (requested == "fastest")
    if requested == "auto":
        assert found[0]["chosen"]["routed_calls"] == {"natten: a kernel size of 1": 3}
        assert found[0]["lines"][-1] == (
            "decoder attention: 3 of 3 calls went to sdpa instead: natten: a kernel size of 1 (3)"
        )
