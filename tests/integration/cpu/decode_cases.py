"""What runs on the ranks of test_exact_decode: sharded and streamed decodes against the stock untiled one."""

import contextlib
import copy
import os
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from diffusers import LTX2VideoDiffusionDecoderModel
from diffusers.models.autoencoders import ltx2_diffusion_decoder
from PIL import Image

from layers.fused.heads import Rotary
from layers.neighborhood_attention import neighborhood_attention_sdpa
from layers.parallel_state import ParallelState
from runner.distributed import start
from runner_models import load_model
from runner_models.ltx2.decoder import buffers, geometry, steps
from runner_models.ltx2.decoder.exact import ExactDecoder
from runner_models.ltx2.decoder.geometry import split_rows
from runner_models.ltx2.decoder.halo import Shard
from runner_models.ltx2.decoder.options import DecodeOptions
from runner_models.ltx2.decoder.video import VideoDecoder
from runner_models.ltx2.pixels import to_uint8
from runner_models.ltx2.tiny import tiny_checkpoint

SEED = 2


@dataclass(frozen=True)
class Case:
    """One decode. `size` is (frames, rows, columns) of the latents; `shares` the latent rows of each rank."""

    size: tuple[int, int, int] = (3, 7, 8)
    chunk: int | None = None
    steps: int = 1
    predicts: str = "x0"
    shares: tuple[int, ...] | None = None

    @property
    def name(self) -> str:
        """For reports."""
        parts = ["x".join(map(str, self.size)), f"chunk {self.chunk or 'all'}"]
        parts += [f"{self.steps} steps of {self.predicts}"] if (self.steps, self.predicts) != (1, "x0") else []
        return ", ".join([*parts, *([f"rows {'+'.join(map(str, self.shares))}"] if self.shares else [])])


class StockProcessor:
    """The stock projection and our tiled SDPA: the reference."""

    def __call__(self, attn: Any, hidden_states: torch.Tensor, block_mask: None = None) -> torch.Tensor:
        query, key, value = attn.project_qkv(hidden_states)
        return attn.to_out[0](neighborhood_attention_sdpa(query, key, value, attn.kernel_size).flatten(-2))


@cache
@torch.inference_mode(False)
def tiny_decoder() -> Any:
    """The tiny checkpoint's decoder: production kernels and head_dim, depths (2, 2, 2, 2, 3)."""
    model = LTX2VideoDiffusionDecoderModel.from_pretrained(tiny_checkpoint(), subfolder="diffusion_decoder")
    model.eval().requires_grad_(False).set_attn_processor(StockProcessor())
    return model


def latents_of(case: Case) -> torch.Tensor:
    """(1, 128, *size) noise."""
    return torch.randn(1, 128, *case.size, generator=torch.Generator().manual_seed(1))


@contextlib.contextmanager
def _kind(model: Any, predicts: str) -> Iterator[None]:
    with mock.patch.object(model.decoder, "model_output_type", predicts):
        yield


@torch.inference_mode()
def stock(case: Case) -> torch.Tensor:
    """(1, 3, F, H, W) of the stock model, untiled."""
    model = tiny_decoder()
    with _kind(model, case.predicts):
        generator = torch.Generator().manual_seed(SEED)
        return model.decode(latents_of(case), generator=generator, num_inference_steps=case.steps, return_dict=False)[0]


def ours(case: Case, shard: Shard | None = None) -> torch.Tensor:
    """(1, 3, F, H', W') of this rank's part."""
    model = tiny_decoder()
    with _kind(model, case.predicts):
        pieces = ExactDecoder(model, attention=neighborhood_attention_sdpa).decode(
            latents_of(case),
            generator=torch.Generator().manual_seed(SEED),
            num_inference_steps=case.steps,
            chunk_frames=case.chunk,
            shard=shard,
        )
        found = list(pieces)
    assert case.chunk is None or all(piece.shape[1] <= case.chunk for piece in found)
    return torch.cat(found, dim=1).transpose(1, 2) if found else torch.empty(0)


def shard_of(case: Case, state: ParallelState) -> Shard:
    """The longer axis in the case's shares, or as even as can be."""
    axis = 2 if case.size[2] > case.size[1] else 1
    bounds = split_rows(case.size[axis], state.sequence_degree)
    if case.shares:
        assert sum(case.shares) == case.size[axis]
        bounds = tuple((sum(case.shares[:i]), sum(case.shares[: i + 1])) for i in range(len(case.shares)))
    return Shard(axis, bounds, state.sequence_rank, state.sequence_group)


def deviation(got: torch.Tensor, want: torch.Tensor) -> float:
    """Largest difference, in standard deviations of what is wanted; infinite for another shape."""
    return float((got - want).abs().max() / want.std()) if got.shape == want.shape else float("inf")


def _own(want: torch.Tensor, shard: Shard) -> torch.Tensor:
    begin, end = shard.scaled(32)[shard.rank]
    return want.narrow(2 + shard.axis, begin, end - begin)


def check_cases(cases: list[Case], faults: list[tuple[str, Case]]) -> dict[str, float]:
    """Every case's largest deviation over the ranks; then those of the faults, which must show."""
    wanted: dict[tuple[Any, ...], torch.Tensor] = {}
    report = {}
    with start(ulysses_degree=int(os.environ["WORLD_SIZE"]), timeout=timedelta(seconds=240)) as session:
        state = session.state
        for name, case in [(case.name, case) for case in cases] + faults:
            key = (case.size, case.steps, case.predicts)
            if key not in wanted:
                wanted[key] = _shared_stock(case, state)
            shard = shard_of(case, state)
            with fault(name) if (name, case) in faults else contextlib.nullcontext():
                worst = torch.tensor(deviation(ours(case, shard), _own(wanted[key], shard)))
            if state.sequence_degree > 1:
                dist.all_reduce(worst, op=dist.ReduceOp.MAX)
            report[name] = float(worst)
    return report


def _shared_stock(case: Case, state: ParallelState) -> torch.Tensor:
    """Computed by one rank for all."""
    if state.sequence_degree == 1:
        return stock(case)
    shared = [stock(case) if state.is_replica_leader else None]
    dist.broadcast_object_list(shared, src=state.rank - state.sequence_rank, group=state.sequence_group)
    assert shared[0] is not None
    return shared[0]


@contextlib.contextmanager
def fault(name: str) -> Iterator[None]:
    """Break the decode in one way."""
    real_halo, real_part = geometry.halo, Rotary.part
    if name == "halo one row off":

        def wrong_halo(bounds: Any, rank: int, **grid: int) -> Any:
            found = real_halo(bounds, rank, **grid)
            sends = tuple((peer, (a - 1, b - 1) if a > found.own[0] else (a, b)) for peer, (a, b) in found.sends)
            return geometry.Halo(found.own, found.needed, found.interior, sends, found.receives)

        patch: Any = mock.patch("runner_models.ltx2.decoder.halo.halo", wrong_halo)
    elif name in ("positions of the shard", "positions of the chunk"):
        axes = (1, 2) if name.endswith("shard") else (0,)

        def wrong_part(self: Rotary, starts: Any) -> Rotary:
            return real_part(self, tuple(0 if axis in axes else start for axis, start in enumerate(starts)))

        patch = mock.patch.object(Rotary, "part", wrong_part)
    elif name == "keys of the window's middle":
        middle = property(lambda self: min(self.length, self.finished))
        patch = mock.patch.object(geometry.Window, "first_key", middle)
    elif name == "queries answered one frame early":
        real_ready = geometry.Window.ready
        early = property(lambda self: min(real_ready.fget(self) + 1, self.received - self.finished))  # type: ignore[attr-defined]
        patch = mock.patch.object(geometry.Window, "ready", early)
    elif name == "a frame dropped at every push":
        patch = mock.patch.object(
            steps.Upsample, "at_start", property(lambda self: True, lambda self, value: None), create=True
        )
    elif name == "context of the first frames":
        real_view = buffers.FrameBuffer.view
        patch = mock.patch.object(
            buffers.FrameBuffer, "view", lambda self, first, count: real_view(self, self.first, count)
        )
    else:
        raise KeyError(name)
    with patch:
        yield


def video_decoder(state: ParallelState, **options: Any) -> VideoDecoder:
    """What the pipeline uses, on the tiny decoder."""
    return VideoDecoder(
        tiny_decoder(), None, attention=neighborhood_attention_sdpa, options=DecodeOptions(**options), state=state
    )


def small_tiles(model: Any) -> None:
    """Two tiles of 256 columns, 224 apart, for 448x224 pixels."""
    model.enable_tiling(tile_sample_min_width=256, tile_sample_stride_width=224)


WIDE = (3, 7, 14)


def seam(difference_FHWC: torch.Tensor, column: int) -> float:
    """How much larger the mean difference is within 32 columns of a border than farther than 100 from it."""
    columns = difference_FHWC.float().mean(dim=(0, 1, 3))
    distance = (torch.arange(columns.shape[0]) + 0.5 - column).abs()
    return float(columns[distance < 32].mean() / (columns[distance > 100].mean() + 1e-6))


def frame_seam(difference_BCFHW: torch.Tensor, borders: list[int]) -> float:
    """How much larger the mean difference of the frames on both sides of a border is than that of all others."""
    frames = difference_BCFHW.abs().mean(dim=(0, 1, 3, 4))
    near = torch.zeros_like(frames, dtype=torch.bool)
    near[[frame for border in borders for frame in (border - 1, border)]] = True
    return float(frames[near].mean() / frames[~near].mean())


def check_video() -> dict[str, Any]:
    """On every rank: bytes out of VideoDecoder, exact in chunks and tiled, against one process; the seams of both."""
    report: dict[str, Any] = {}
    found: dict[str, torch.Tensor] = {}
    with start(ulysses_degree=int(os.environ["WORLD_SIZE"]), timeout=timedelta(seconds=240)) as session:
        state, model = session.state, tiny_decoder()
        small_tiles(model)
        case = Case(WIDE, predicts="v")  # tiles of a v model share one canvas: what differs is what they do not see
        with _kind(model, "v"):
            for method in ("exact", "tiled"):
                decoder = video_decoder(state, method=method, parallel=True, chunk_frames=8)
                pieces = list(decoder.frames(latents_of(case), torch.Generator().manual_seed(SEED)))
                if state.is_replica_leader:
                    found[method] = torch.cat(pieces).int()
                    report[f"{method} pieces"] = [piece.shape[0] for piece in pieces]
                else:
                    assert not pieces
            if state.is_replica_leader:
                alone = video_decoder(ParallelState(), method="tiled")
                (tiled,) = alone.frames(latents_of(case), torch.Generator().manual_seed(SEED))
                report["tiled is tiled alone"] = torch.equal(found["tiled"], tiled.int())
                model.disable_tiling()
                want = to_uint8(stock(case))[0].int()
                exact = (found["exact"] - want).abs()
                report["exact largest"] = int(exact.max())
                report["exact part that differs"] = float((exact > 0).float().mean())
                report["exact seam"] = seam(exact, 224)
                report["tiled seam"] = seam((found["tiled"] - want).abs(), 240)
        session.barrier("compared")
    return report


@torch.inference_mode()
def stock_in_fp64(case: Case) -> torch.Tensor:
    """The stock decode with the noise of the fp32 one; rotary angles stay fp32, as everywhere."""
    model = copy.deepcopy(tiny_decoder()).double()
    draw = ltx2_diffusion_decoder.randn_tensor

    def noise(shape: Any, generator: Any = None, device: Any = None, dtype: Any = None) -> torch.Tensor:
        return draw(shape, generator=generator, device=device, dtype=torch.float32).to(dtype)

    with mock.patch.object(ltx2_diffusion_decoder, "randn_tensor", noise):
        generator = torch.Generator().manual_seed(SEED)
        return model.decode(latents_of(case).double(), generator=generator, return_dict=False)[0]


def check_requests() -> dict[str, Any]:
    """Whole requests on the tiny model: decoded by all ranks in chunks, against one process at once."""
    report: dict[str, Any] = {}
    size = {"height": 256, "width": 320, "num_frames": 17}
    with start(ulysses_degree=int(os.environ["WORLD_SIZE"]), timeout=timedelta(seconds=240)) as session:
        options = DecodeOptions(parallel=True, streaming=True, chunk_frames=8)
        together = load_model("tiny", state=session.state, decode=options)
        image = Image.effect_noise((320, 256), 80).convert("RGB") if session.state.rank == 0 else None
        image = session.broadcast_object(image)
        for task in ("t2v", "i2v"):
            request = together.request("a cat dancing", image=image if task == "i2v" else None, **size)
            output = together.generate(request)
            if output is None:
                continue
            pieces = list(output.frames)
            alone = load_model("tiny").generate(request)
            assert alone is not None
            difference = (torch.cat(pieces).int() - alone.all_frames().int()).abs()
            report[task] = {
                "pieces": [piece.shape[0] for piece in pieces],
                "largest": int(difference.max()),
                "part that differs": float((difference > 0).float().mean()),
                "video_decode": together.describe()["video_decode"],
            }
        session.barrier("compared")
    return report


def check_agreement() -> int:
    """The chunk of all ranks, of which only the last has little memory."""
    with start(ulysses_degree=int(os.environ["WORLD_SIZE"]), timeout=timedelta(seconds=60)) as session:
        state = session.state
        free = 1 if state.rank == state.world_size - 1 else 2**50
        with mock.patch("runner_models.ltx2.decoder.video.free_bytes", return_value=free):
            chunk = video_decoder(state, parallel=True)._chunk((3, 7, 8))
        session.barrier("agreed")
        assert chunk is not None
        return chunk
