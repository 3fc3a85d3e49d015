"""The halves of a block beside the stock block, in this process or in a worker: see conftest.py of tests/unit."""

from dataclasses import dataclass
from unittest import mock

import torch
from diffusers.models.autoencoders.ltx2_diffusion_decoder import LTX2VideoVaeDiffusionNABlock, LTX2VideoVaeNABlock

from runner_models.ltx2.decoder import pointwise
from runner_models.ltx2.decoder.pointwise import FusedTokens, Modulation, SlicedTokens

WAYS = {"sliced": SlicedTokens, "fused": FusedTokens}


@dataclass(frozen=True)
class Case:
    """A block of `channels` on a part of a grid: `counts` (T, H, W) from `starts` on."""

    diffusion: bool
    channels: int = 64
    head_dim: int = 16
    batch: int = 1
    starts: tuple[int, int, int] = (0, 0, 0)
    counts: tuple[int, int, int] = (3, 5, 7)
    adapter: str | None = None

    @property
    def grid(self) -> tuple[int, int, int]:
        """The whole grid: four more on every axis, as many as a window needs."""
        t, h, w = (start + count + 4 for start, count in zip(self.starts, self.counts, strict=True))
        return t, h, w

    def part(self) -> tuple[slice, ...]:
        """Of (B, T, H, W, ...)."""
        spans = (slice(start, start + count) for start, count in zip(self.starts, self.counts, strict=True))
        return (slice(None), *spans)


class Recording:
    """A processor that keeps Q, K, V and answers with a given result of the attention."""

    def __init__(self, attended: torch.Tensor) -> None:
        self.attended, self.heads = attended, ()

    def __call__(self, attn, hidden_states, block_mask=None):
        self.heads = attn.project_qkv(hidden_states)
        return attn.to_out[0](self.attended.flatten(-2))


def block(case: Case):
    """A stock block whose every parameter matters."""
    torch.manual_seed(0)
    kernel = (3, 5, 5)
    if case.diffusion:
        stock = LTX2VideoVaeDiffusionNABlock(case.channels, kernel, 48, head_dim=case.head_dim)
    else:
        stock = LTX2VideoVaeNABlock(case.channels, kernel, head_dim=case.head_dim)
    stock.requires_grad_(False)
    for name, parameter in stock.named_parameters():
        if parameter.ndim == 1 or name == "scale_shift_table":  # gains, biases, modulation
            parameter.copy_(("norm" in name) + 0.5 * torch.randn(parameter.shape))
    if case.adapter is not None:
        from peft import LoraConfig, inject_adapter_in_model

        adapter = LoraConfig(r=2, target_modules=[case.adapter], init_lora_weights=False)
        inject_adapter_in_model(adapter, stock)
    return stock


def halves(case: Case, way: str, *, slice_tokens: int | None = None):
    """What this way and the stock block make of the same tokens: (Q, K, V, frames afterwards) of each."""
    torch.set_num_threads(1)
    stock = block(case)
    with torch.inference_mode(), mock.patch.dict(pointwise.SLICE_TOKENS, {"cpu": slice_tokens or 2**14}):
        return _halves(case, way, stock)


def _halves(case: Case, way: str, stock):
    frames = torch.randn(case.batch, *case.grid, case.channels)
    heads = (case.batch, *case.grid, case.channels // case.head_dim, case.head_dim)
    attended, context = torch.randn(heads), torch.randn(*frames.shape[:4], 48) if case.diffusion else None
    shared = [torch.randn(1, 1, 1, 1, case.channels).expand(case.batch, -1, -1, -1, -1) for _ in range(7)]
    recording = Recording(attended)
    stock.attn.set_processor(recording)
    finished = stock(frames, context, tuple(shared)) if case.diffusion else stock(frames)
    part = case.part()
    want = [x[part] for x in (*recording.heads, finished)]

    own = WAYS[way](stock, _modulation(stock, shared) if case.diffusion else None, case.grid)
    # A chunk: some frames of a longer tensor, their rows and columns with no gaps.
    longer = torch.full((case.batch, case.counts[0] + 3, *case.counts[1:], case.channels), float("nan"))
    chunk = longer[:, 2:-1].copy_(frames[part])
    out = _outputs(chunk, heads[-2:])
    own.project(chunk, None if context is None else context[part], case.starts, out)
    got = [x.clone() for x in out]
    own.finish(chunk, attended[part].contiguous())
    assert longer[:, :2].isnan().all()
    assert longer[:, -1].isnan().all()
    return [*got, chunk], want


def _modulation(stock, shared) -> Modulation:
    rows = [x + table for x, table in zip(shared, stock.scale_shift_table, strict=True)]
    return Modulation(1 + rows[0], rows[1], 1 + rows[3], rows[4])


def _outputs(chunk, heads):
    """NaN, K and V with room for the rows of other ranks."""
    shape = (*chunk.shape[:4], *heads)
    wide = (*shape[:2], shape[2] + 4, *shape[3:])
    q, k, v = (torch.full(s, float("nan")) for s in (shape, wide, wide))
    return q, k[:, :, 3:-1], v[:, :, 3:-1]


def chosen(case: Case) -> str:
    """The way that `pointwise` takes for fp32 frames."""
    return type(pointwise.pointwise(block(case), None, case.grid, torch.empty(1, case.channels))).__name__
