"""Live tensors of the exact decode: bounded by the chunk, and what the estimate says. Counted at every operation."""

from functools import cache
from typing import Any

import pytest
import torch
from decode_inside import NoTransfer
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from runner_models.ltx2.build import build_component, component_config
from runner_models.ltx2.decoder import budget, halo, pointwise
from runner_models.ltx2.decoder.exact import ExactDecoder
from runner_models.ltx2.decoder.geometry import split_rows
from runner_models.ltx2.decoder.halo import Shard
from runner_models.ltx2.decoder.steps import Canvas, Upsample

KERNELS = [[3, 3, 3]] * 4
DEPTHS = [1, 1, 1, 1, 4]


class LiveBytes(TorchDispatchMode):
    """Most bytes held at once by tensors made inside, counting each storage once."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = self._held = 0
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {
            x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)
        } - self._live.keys()
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor) and x.untyped_storage()._cdata not in given:
                reference = StorageWeakRef(x.untyped_storage())
                known = self._live.get(reference.cdata)
                if known is None or known[0].expired():
                    self._live[reference.cdata] = (reference, x.untyped_storage().nbytes())
                    self._held += x.untyped_storage().nbytes()
        if self._held > self.peak:
            self._live = {key: entry for key, entry in self._live.items() if not entry[0].expired()}
            self._held = sum(size for _, size in self._live.values())
            self.peak = max(self.peak, self._held)
        return out


@cache
def _decoder() -> Any:
    config = component_config(
        "diffusion_decoder",
        {
            "decoder_stage_channels": [128, 64, 64, 64, 64],
            "decoder_stage_depths": DEPTHS,
            "decoder_stage_kernels": KERNELS,
            "decoder_upsample_channel_reductions": [2, 1, 1, 1],
            "decoder_t_emb_dim": 32,
        },
    )
    return build_component("diffusion_decoder", config)


def _no_attention(q: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    return torch.empty(q.shape, dtype=q.dtype).zero_()


def _peak(
    latents: int, chunk: int | None, monkeypatch: pytest.MonkeyPatch, *, rows: int = 3, shard: Shard | None = None
) -> int:
    """Bytes beside weights, latents and the noise, which waits elsewhere when the decode streams; of a rank whose halo
    rows are there at once.
    """
    model = _decoder()
    z = torch.zeros(1, 128, latents, rows, 3)
    frames = 8 * latents - 7
    own = rows if shard is None else shard.own[1] - shard.own[0]
    noise = torch.zeros(1, 3, frames, 32 * own, 96)
    monkeypatch.setattr(halo, "_Transfer", NoTransfer)
    monkeypatch.setattr(ExactDecoder, "_canvas", lambda *_, **__: Canvas(noise, z.device))
    monkeypatch.setitem(pointwise.SLICE_TOKENS, "cpu", 2**11)
    monkeypatch.setitem(pointwise.SLICE_TOKENS, "accelerator", 2**11)
    count = 0
    with LiveBytes() as live:
        for piece in ExactDecoder(model, attention=_no_attention).decode(z, chunk_frames=chunk, shard=shard):
            count += piece.shape[1]
            del piece
    assert count == frames
    return live.peak


@pytest.mark.slow
def test_streaming_does_not_grow_with_the_clip(monkeypatch: pytest.MonkeyPatch) -> None:
    short, long = (_peak((frames - 1) // 8 + 1, 8, monkeypatch) for frames in (121, 481))
    assert long <= 1.1 * short
    assert _peak(31, None, monkeypatch) > 2 * short, "the whole clip at once does"


@pytest.mark.parametrize("chunk", [8, None], ids=str)
def test_the_estimate(chunk: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may ask for more than is needed, by what does not grow with the depth: 4 blocks here, 8 in production."""
    peak = _peak(20, chunk, monkeypatch)
    noise = 0 if chunk else 3 * 153 * 96 * 96 * 4
    estimate = budget.decode_bytes(_decoder().config, (20, 3, 3), element=4, chunk_frames=chunk)
    assert 0.95 * (peak + noise) <= estimate <= 1.3 * (peak + noise)


@pytest.mark.parametrize("chunk", [8, None], ids=str)
def test_the_estimate_of_a_rank_between_two(chunk: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has halo rows on both sides."""
    shard = Shard(1, split_rows(9, 3), 1, None)
    peak = _peak(8, chunk, monkeypatch, rows=9, shard=shard)
    noise = 0 if chunk else 3 * 57 * 96 * 96 * 4
    estimate = budget.decode_bytes(_decoder().config, (8, 9, 3), element=4, chunk_frames=chunk, ranks=3)
    assert 0.95 * (peak + noise) <= estimate <= 1.3 * (peak + noise)
    alone = budget.decode_bytes(_decoder().config, (8, 9, 3), element=4, chunk_frames=chunk)
    assert alone > 2 * (peak + noise), "a third of the clip, and halo rows"


CONFIG = component_config("diffusion_decoder")
GIB = 2**30


def test_production_sizes() -> None:
    """1536x1024x121, bf16; the state of DESIGN.md is 13.4 GiB."""
    grid = (16, 48, 32)
    needed = {chunk: budget.decode_bytes(CONFIG, grid, element=2, chunk_frames=chunk) / GIB for chunk in (8, 16, None)}
    assert 13.4 < needed[8] < needed[16] < 24 < needed[None] < 64
    longer = budget.decode_bytes(CONFIG, (31, 48, 32), element=2, chunk_frames=16) / GIB
    assert longer == pytest.approx(needed[16], rel=0.01)
    eight = budget.decode_bytes(CONFIG, grid, element=2, ranks=8) / GIB
    assert needed[None] / 8 < eight < needed[None] / 4, "halos are kept too"


def test_the_chunk_that_fits() -> None:
    def chosen(gib: float, *, streaming: bool = False) -> int | None:
        return budget.choose_chunk(CONFIG, (16, 48, 32), element=2, free_bytes=int(gib * GIB), streaming=streaming)

    assert chosen(100) is None
    assert chosen(100, streaming=True) == budget.MAX_CHUNK_FRAMES
    assert chosen(30) in (16, 24)
    assert chosen(5) == 8
    short = {"element": 2, "free_bytes": int(18 * GIB), "streaming": True}
    assert budget.choose_chunk(CONFIG, (7, 48, 32), **short) is None, "49 frames at once need less than a chunk's state"


def test_a_suspended_upsample_holds_neither_its_input_nor_its_output() -> None:
    """The nodes below work while it waits; its input is 1.6 GiB before stage 5 at 1536x1024x121."""
    decoder = _decoder().decoder
    frames = torch.randn(1, 2, 3, 3, decoder.upsamples[0].proj.in_features)
    given = StorageWeakRef(frames.untyped_storage())
    pushed = Upsample(decoder.upsamples[0], 2).push(frames)
    del frames
    out = next(pushed)
    assert given.expired()
    made = StorageWeakRef(out.untyped_storage())
    del out
    assert made.expired()
