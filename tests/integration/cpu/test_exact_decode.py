"""The exact decode against the stock decoder, untiled: fp32, CPU, production kernels, every split of frames and rows.

Deviations are the largest difference over the reference's standard deviation.
"""

import contextlib
import logging

import pytest
import torch
from decode_cases import (
    SEED,
    Case,
    check_agreement,
    check_cases,
    check_requests,
    check_video,
    deviation,
    fault,
    frame_seam,
    latents_of,
    ours,
    stock,
    stock_in_fp64,
    tiny_decoder,
    video_decoder,
)
from ranks import run_ranks

from layers.neighborhood_attention import neighborhood_attention_sdpa
from layers.parallel_state import ParallelState
from runner_models.ltx2.decoder import video
from runner_models.ltx2.decoder.budget import decode_bytes
from runner_models.ltx2.decoder.exact import ExactDecoder
from runner_models.ltx2.decoder.options import DecodeOptions
from runner_models.ltx2.decoder.tiled import assign
from runner_models.ltx2.decoder.video import VideoDecoder

# fp32, order of sums only. Measured: 0 for one push, 1.5e-5 for chunks; for shards, whose matrix products have other
# shapes, up to 8e-5, and 1.1e-4 on a CPU with AMX. The stock decode itself is 6e-5 from the same decode in fp64; two
# SDPA tilings of it differ by 3e-6. The mildest fault below is above 1e-2.
TOLERANCE = 1e-4
SHARD_TOLERANCE = 2e-4


@pytest.fixture(scope="module")
def wanted() -> torch.Tensor:
    return stock(Case())


def test_one_push_is_the_stock_decode(wanted: torch.Tensor) -> None:
    assert deviation(ours(Case()), wanted) <= 1e-6


def test_chunks_without_a_seam(wanted: torch.Tensor) -> None:
    """Neither is any frame off, nor are those at a border of two pieces further off than the others."""
    got = ours(Case(chunk=8))
    assert deviation(got, wanted) <= TOLERANCE
    borders = [6, 14]  # pieces of 6, 8 and 3 frames, as in test_bytes_on_the_saving_rank_and_no_seam
    assert frame_seam(got - wanted, borders) < 3
    marked = got.clone()
    marked[:, :, 6] += 1e-3 * wanted.std()
    assert frame_seam(marked - wanted, borders) > 10, "it would see a seam of a thousandth"


SEEN = ("positions of the chunk", "context of the first frames", "a frame dropped at every push")
REFUSED = ("keys of the window's middle", "queries answered one frame early")
"""By the checks of the attention itself."""


@pytest.mark.parametrize("name", SEEN + REFUSED)
def test_a_fault_of_chunks_shows(name: str, wanted: torch.Tensor) -> None:
    with fault(name):
        if name in REFUSED:
            with pytest.raises(ValueError, match="the windows of q need keys"):
                ours(Case(chunk=8))
            return
        found = deviation(ours(Case(chunk=8)), wanted)
    assert found > 100 * TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("frames", [4, 7], ids=["25-frames", "49-frames"])
def test_longer_clips(frames: int) -> None:
    want = stock(Case(size=(frames, 7, 7)))
    for chunk in (8, 16, None):
        assert deviation(ours(Case(size=(frames, 7, 7), chunk=chunk)), want) <= TOLERANCE, chunk


@pytest.mark.slow
@pytest.mark.parametrize(("steps", "predicts"), [(2, "x0"), (1, "v"), (3, "v")])
def test_steps_and_velocity(steps: int, predicts: str) -> None:
    case = Case(size=(3, 7, 7), steps=steps, predicts=predicts)
    want = stock(case)
    for chunk in (8, None):
        assert deviation(ours(Case(case.size, chunk, steps, predicts)), want) <= TOLERANCE, chunk


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [8, None])
def test_as_close_to_the_exact_values_as_stock(chunk: int | None, wanted: torch.Tensor) -> None:
    exact = stock_in_fp64(Case())
    assert deviation(ours(Case(chunk=chunk)).double(), exact) <= 1.2 * deviation(wanted.double(), exact)


TWO = [Case(chunk=8, shares=(3, 5))]
TWO_FAULTS = [("halo one row off", Case(chunk=8)), ("positions of the shard", Case())]
MORE = [Case((frames, 8, 7), chunk) for frames in (3, 4) for chunk in (8, 16, None)]
UNEVEN = [Case(chunk=8), Case(size=(3, 8, 7), shares=(1, 2, 1, 4))]


@pytest.mark.parametrize(
    ("world", "cases", "faults"),
    [
        pytest.param(2, TWO, TWO_FAULTS, id="2-ranks"),
        pytest.param(4, UNEVEN, [], id="4-ranks", marks=pytest.mark.slow),
        pytest.param(
            2, [*MORE, Case((7, 7, 8), 16), Case((3, 7, 8), 8, 2)], [], id="2-ranks-more", marks=pytest.mark.slow
        ),
        pytest.param(3, [*MORE, Case((3, 7, 9), 8, shares=(1, 2, 6))], [], id="3-ranks", marks=pytest.mark.slow),
        pytest.param(4, [*MORE, Case((7, 7, 11), 16)], [], id="4-ranks-more", marks=pytest.mark.slow),
        pytest.param(8, [Case((3, 7, 8), 8), Case((3, 7, 16), None)], [], id="8-ranks", marks=pytest.mark.slow),
    ],
)
def test_shards(world: int, cases: list[Case], faults: list[tuple[str, Case]]) -> None:
    found = run_ranks(check_cases, world, cases, faults)
    for case in cases:
        assert found[case.name] <= SHARD_TOLERANCE, case
    for name, _ in faults:
        assert found[name] > 100 * TOLERANCE, name


def test_what_cannot_be_decoded() -> None:
    decoder = ExactDecoder(tiny_decoder(), attention=neighborhood_attention_sdpa)
    with pytest.raises(ValueError, match="chunk_frames 12 is not a positive multiple of 8"):
        next(decoder.decode(latents_of(Case()), chunk_frames=12))
    with pytest.raises(ValueError, match="smaller than its window"):
        next(decoder.decode(latents_of(Case(size=(3, 6, 8)))))
    with contextlib.closing(decoder.decode(latents_of(Case()), generator=torch.Generator().manual_seed(SEED))):
        pass


@pytest.mark.slow
def test_bytes_on_the_saving_rank_and_no_seam() -> None:
    """Two ranks meet at column 224, where two tiles do; the tiles show it, the shards do not."""
    found = run_ranks(check_video, 2)
    assert found["exact pieces"] == [6, 8, 3]
    assert found["exact largest"] <= 1
    assert found["exact part that differs"] < 1e-3  # by one, where a value lies at the half
    assert found["tiled is tiled alone"], "the same tiles on any number of ranks"
    assert found["exact seam"] < 3
    assert found["tiled seam"] > 10


@pytest.mark.slow
def test_requests_on_two_ranks() -> None:
    """t2v and i2v through the whole model: two ranks that decode in chunks give the frames of one that does not."""
    found = run_ranks(check_requests, 2)
    for task in ("t2v", "i2v"):
        assert found[task]["pieces"] == [6, 8, 3]
        assert found[task]["largest"] <= 1
        assert found[task]["part that differs"] < 1e-3
        assert found[task]["video_decode"] == {"method": "exact", "ranks": 2, "chunk_frames": 8}


def test_tiles_go_to_ranks_longest_first() -> None:
    assert assign([1, 8, 3, 5], 2) == [0, 0, 1, 1], "8 + 1 and 5 + 3: ties go to the first"
    assert assign([2, 2, 2], 4) == [0, 1, 2]


def test_chunks_by_itself_where_the_clip_does_not_fit(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    decoder = video_decoder(ParallelState())
    needed = decode_bytes(tiny_decoder().config, (16, 48, 32), element=4)
    with caplog.at_level(logging.INFO):
        monkeypatch.setattr(video, "free_bytes", lambda device: 2 * needed)
        assert decoder._chunk((16, 48, 32)) is None
        assert not caplog.messages
        monkeypatch.setattr(video, "free_bytes", lambda device: needed)
        assert decoder._chunk((16, 48, 32)) in (8, 16, 24, 32)
    assert "the whole clip does not fit" in caplog.text


def test_out_of_memory_says_what_would_need_less() -> None:
    def greedy(*_: object, **__: object) -> torch.Tensor:
        raise torch.OutOfMemoryError("tried to allocate 3 GiB")

    decoder = VideoDecoder(
        tiny_decoder(), None, attention=greedy, options=DecodeOptions(chunk_frames=16), state=ParallelState()
    )
    with pytest.raises(torch.OutOfMemoryError, match="tried to allocate 3 GiB") as caught:
        list(decoder.frames(latents_of(Case()), torch.Generator()))
    for part in ("in chunks of 16 frames needs about", "--decode_chunk_frames 8", "--use_parallel_vae on 2 ranks"):
        assert part in str(caught.value)


def test_ranks_agree_on_the_chunk() -> None:
    assert run_ranks(check_agreement, 2) == 8
