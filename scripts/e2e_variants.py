"""Parts of bench_e2e.py: one variant of a request, ours or a peer's, and how it is verified and timed."""

import dataclasses
import functools
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol
from unittest import mock

import torch
import torch.distributed as dist
import yaml
from peers.peer import Peer
from peers.sharing import share_parts
from peers.work import CountedAttention, NestedClock, Work, watch

from runner.checks import check
from runner.config import RunConfig
from runner.delivery import save_video
from runner.distributed import Session
from runner.engine import generate_round
from runner.errors import UsageError
from runner.flags import FLAGS, convert
from runner.metrics import Sample, StageClock, peak_memory_bytes, reset_peak_memory, slowest
from runner_models.api import VideoRequest
from runner_models.ltx2.attentions import choose_attentions
from runner_models.ltx2.load import Parts, Source
from runner_models.ltx2.pipeline import Ltx2Model

NAMES = ("ours", "stock", "xfuser")
STAGES = ("encode", "stage1", "upsample", "stage2", "audio_decode", "video_decode", "mux")
OPTIONS = (
    "attention_backend",
    "decoder_attention",
    "use_torch_compile",
    "use_parallel_vae",
    "enable_tiling",
    "decode_chunk_frames",
    "vae_decode",
)
"""Flags that a variant may set for itself: those that leave the work the same."""


@dataclass(frozen=True)
class Weights:
    """What all variants share."""

    parts: Parts
    source: Source


@dataclass(frozen=True)
class Verified:
    """A request whose result was kept: frames (F, H, W, 3) uint8 and audio on the rank that has them, work of each."""

    frames: torch.Tensor | None
    audio: torch.Tensor | None
    work: Work


class Contestant(Protocol):
    """One way to make the request. Every rank calls every method."""

    compile_seconds: float | None

    def verify(self) -> Verified:
        """Make the request once, keep the result and count the work."""
        ...

    def round(self, iteration: int, folder: Path | None) -> tuple[list[Sample], float]:
        """Make it again, timed. On rank 0 a sample for each video made at once, and the seconds until all were there.

        With `folder`, there means in a file.
        """
        ...

    def describe(self) -> dict[str, Any]:
        """JSON types."""
        ...

    def close(self) -> None:
        """Give up memory."""
        ...


@dataclass
class Variant:
    """A line of the table: `spec` as on the command line, `config` of its run, and what was measured."""

    spec: str
    name: str
    options: dict[str, Any]
    config: RunConfig
    contestant: Contestant | None = None
    samples: list[Sample] = field(default_factory=list)
    to_file_seconds: list[float] = field(default_factory=list)
    row: dict[str, Any] = field(default_factory=dict)


def parse_variant(spec: str, config: RunConfig, *, world_size: int, gpus: int) -> Variant:
    """`ours:vae_decode=tiled,decoder_attention=sdpa` -> a variant of the run `config`.

    Raises:
        UsageError: an unknown name or option, or options that do not go together.
    """
    name, _, rest = spec.partition(":")
    if name not in NAMES:
        raise UsageError(f"--variants {spec}: {name} is not known; allowed: {', '.join(NAMES)}.")
    options = {}
    for entry in filter(None, rest.split(",")):
        key, _, value = entry.partition("=")
        if key not in OPTIONS:
            raise UsageError(f"--variants {spec}: {key} is not an option of a variant; allowed: {', '.join(OPTIONS)}.")
        try:
            typed = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise UsageError(f"--variants {spec}: the value of {key} cannot be read.") from error
        if typed is None:
            raise UsageError(f"--variants {spec}: {key} has no value; write {key}=VALUE.")
        options[key] = convert(FLAGS[key], typed, where=f" in --variants {spec}")
    config = check(
        dataclasses.replace(config, **options), world_size=world_size, local_world_size=world_size, gpu_count=gpus
    )
    return Variant(spec, name, options, config)


def build(variant: Variant, weights: Weights, request: VideoRequest, session: Session) -> Contestant:
    """Raises what the runner in question raises."""
    config = variant.config
    if variant.name == "ours":
        return Ours(weights, config, request, session)
    options: dict[str, Any] = {"tile": variant.options.get("enable_tiling", True)}
    peer: Peer
    if variant.name == "stock":
        from peers.stock import StockPipelines

        peer = StockPipelines(weights.parts, config, request, session, **options)
    else:
        from peers.xfuser_runner import XfuserRunner

        peer = XfuserRunner(weights.parts, config, request, session, **options)
    return PeerContestant(peer, session)


def start_together(session: Session) -> float:
    """The time at which all ranks are here."""
    session.barrier("start")
    if session.state.world_size > 1:
        dist.barrier()
    if session.state.device.type == "cuda":
        torch.cuda.synchronize(session.state.device)
    return time.perf_counter()


class Ours:
    """This runner's own classes; a round is the engine's."""

    def __init__(self, weights: Weights, config: RunConfig, request: VideoRequest, session: Session) -> None:
        self.config, self.session = config, session
        self.requests = [request] * session.state.data_parallel_degree
        attentions = choose_attentions(
            config.model,
            config.recipe,
            load_format=config.load_format,
            state=session.state,
            dtype=getattr(torch, config.dtype),
            attention_backend=config.attention_backend,
            decoder_attention=config.decoder_attention,
        )
        offload = config.enable_model_cpu_offload
        self.model = Ltx2Model(
            weights.parts if offload else share_parts(weights.parts),  # what is moved cannot be shared
            config.recipe,
            source=weights.source,
            state=session.state,
            attentions=attentions,
            decode=config.decode_options,
            offload=offload,
        )
        self.model.prepare(request)
        self.compile_seconds = self.model.compile(request) if config.use_torch_compile else None

    def verify(self) -> Verified:
        """See Contestant."""
        work, model = Work(), self.model
        with watch(work, transformer=model.text_to_video.transformer, decoder=model.decoder), self._watched(work):
            output = model.generate(self.requests[0], timer=StageClock(model.device))
            frames = None if output is None else output.all_frames()
        return Verified(frames, None if output is None else output.audio, work)

    @contextmanager
    def _watched(self, work: Work) -> Iterator[None]:
        """The exact decode calls an attention and no module of the stock decoder."""
        exact, decoder = self.model.video_decoder.exact, self.model.video_decoder
        decode = decoder.frames

        def frames(latents: torch.Tensor, *args: Any, **kwargs: Any) -> Iterator[torch.Tensor]:
            work.latents = latents
            return decode(latents, *args, **kwargs)

        with (
            mock.patch.object(exact, "attention", CountedAttention(exact.attention, work)),
            mock.patch.object(decoder, "frames", frames),
        ):
            yield

    def round(self, iteration: int, folder: Path | None) -> tuple[list[Sample], float]:
        """See Contestant."""
        save = None
        if folder is not None:
            save = functools.partial(save_video, folder, self.config, self.requests, self.session)
        start = start_together(self.session)
        indices = range(len(self.requests))
        done = generate_round(self.model, self.requests, indices, iteration, self.session, progress=False, save=save)
        seconds = time.perf_counter() - start
        return [
            dataclasses.replace(sample, stage_seconds=sample.stage_seconds | (saved.stage_seconds if saved else {}))
            for sample, saved in done
        ], seconds

    def describe(self) -> dict[str, Any]:
        """See Contestant."""
        return self.model.describe()

    def close(self) -> None:
        """See Contestant."""
        self.model.finish()


class PeerContestant:
    """Another runner, timed from outside."""

    def __init__(self, peer: Peer, session: Session) -> None:
        self.peer, self.session = peer, session
        self.compile_seconds = peer.compile_seconds

    def verify(self) -> Verified:
        """See Contestant."""
        work = Work()
        with watch(work, transformer=self.peer.transformer, decoder=self.peer.decoder):
            made = self.peer.generate(NestedClock(self.session.state.device))
        work.latents = self.peer.latents()
        leads = self.session.state.rank == 0
        return Verified(made.bytes() if leads else None, made.audio if leads else None, work)

    def round(self, iteration: int, folder: Path | None) -> tuple[list[Sample], float]:
        """See Contestant; the file is the peer's own."""
        device = self.session.state.device
        clock = NestedClock(device)
        reset_peak_memory(device)
        start = start_together(self.session)
        made = self.peer.generate(clock)
        if folder is not None:
            with clock("mux"):
                self.peer.save(made, folder)
        seconds = time.perf_counter() - start
        stages = {stage: clock.seconds[stage] for stage in STAGES if stage in clock.seconds}
        sample = Sample(iteration, 0, stages, (peak_memory_bytes(device),))
        gathered = self.session.gather_objects((sample, seconds))
        if self.session.state.rank:
            return [], seconds
        return [slowest([sample for sample, _ in gathered])], max(seconds for _, seconds in gathered)

    def describe(self) -> dict[str, Any]:
        """See Contestant."""
        return self.peer.describe()

    def close(self) -> None:
        """See Contestant."""
        self.peer.close()


@contextmanager
def scratch() -> Iterator[Path]:
    """A folder for the files of a timed round."""
    folder = Path(tempfile.mkdtemp(prefix="bench_e2e_"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
