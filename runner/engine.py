"""One run: check, load once, warm up, time every request, save the videos of the last iteration.

Every rank runs this. With data parallelism prompt i goes to replica i % data_parallel_degree. Only rank 0 writes files,
but for the traces of --profile.
"""

import functools
import hashlib
import logging
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from runner.config import RunConfig
from runner.delivery import Save, Saved, receive_video, save_video, send_video
from runner.distributed import Session
from runner.environment import environment
from runner.errors import UsageError
from runner.media import load_image
from runner.metrics import (
    Sample,
    StageClock,
    device_name,
    peak_memory_bytes,
    reset_peak_memory,
    slowest,
    summarise,
    summary_table,
)
from runner.preflight import check_memory
from runner.profiling import trace
from runner.sidecar import check_output_directory, write_json
from runner_models import load_model, split_folder
from runner_models.api import VideoModel, VideoRequest
from runner_models.ltx2.attentions import choose_attentions
from runner_models.ltx2.load import Source, resolve

logger = logging.getLogger(__name__)

_BYTES_PER_PIXEL = 1.0
"""Room to ask for. On noise, the worst case, H.264 at crf 12 takes 0.82 (155.8 MB for 1536x1024x121)."""


def run(config: RunConfig, session: Session) -> list[Path]:
    """Make every video of `config`; on rank 0 return the paths of the mp4 files.

    Raises:
        UsageError, SetupError: what the user can mend, before any weight is read.
        OSError: a result that could not be written.
    """
    state = session.state
    config = session.broadcast_object(config)
    check_memory(config)
    # Read once: a URL, or a file on another host, might give every rank another picture.
    requests = session.broadcast_object(make_requests(config) if state.rank == 0 else None)
    directory = session.broadcast_object(_output_directory(config, len(requests)) if state.rank == 0 else None)
    progress = state.rank == 0 and sys.stderr.isatty()
    if not progress:
        _silence_loading_bars()
    model, load_seconds = _load(config, session)
    model.prepare(requests[0])
    compile_seconds = _compile(config, model, requests[0])
    _warm_up(config, model, requests[0], session, progress=progress)
    samples, paths = _timed_iterations(config, model, requests, session, directory, progress=progress)
    model.finish()
    if state.rank == 0:
        write_json(
            directory / "metrics.json",
            {
                **environment(state.device),
                "world_size": state.world_size,
                "model": model.describe(),
                "config": config.to_json(),
                "load_seconds": load_seconds,
                "compile_seconds": compile_seconds,
                "iterations": [sample.to_json() for sample in samples],
                "summary": summarise(samples),
            },
        )
        logger.info("timings, also in %s:\n%s", directory / "metrics.json", summary_table(samples))
    return paths


def _output_directory(config: RunConfig, num_requests: int) -> Path:
    pixels = config.height * config.width * config.num_frames
    needed = int(num_requests * pixels * _BYTES_PER_PIXEL)
    return check_output_directory(config.output_directory, needed_bytes=needed)


def _load(config: RunConfig, session: Session) -> tuple[VideoModel, float]:
    """The model on every rank, its attentions chosen before a weight is read; and the seconds of loading."""
    state = session.state
    attentions = choose_attentions(
        config.model,
        config.recipe,
        load_format=config.load_format,
        state=state,
        dtype=getattr(torch, config.dtype),
        attention_backend=config.attention_backend,
        decoder_attention=config.decoder_attention,
    )
    source = resolve_source(config, session)
    started = time.perf_counter()
    model = load_model(
        config.model,
        dtype=config.dtype,
        load_format=config.load_format,
        offload=config.enable_model_cpu_offload,
        state=state,
        source=source,
        attentions=attentions,
        decode=config.decode_options,
    )
    session.barrier("loaded")
    seconds = time.perf_counter() - started
    logger.info("loaded %s in %.1f s on %s", config.model, seconds, device_name(state.device))
    if state.sequence_degree > 1 and not config.use_parallel_vae:
        logger.info("one of %d ranks decodes; --use_parallel_vae spreads the video decode", state.sequence_degree)
    return model, seconds


def resolve_source(config: RunConfig, session: Session) -> Source:
    """The first rank of each machine fetches or makes the checkpoint while the others wait."""
    options: dict[str, Any] = {"load_format": config.load_format, "revision": config.revision}
    first = session.local_rank == 0
    if first:
        source = resolve(config.model, config.recipe, **options)
    session.barrier("checkpoint")
    return source if first else resolve(config.model, config.recipe, fetch=False, **options)


def _compile(config: RunConfig, model: VideoModel, request: VideoRequest) -> float | None:
    if not config.use_torch_compile:
        return None
    started = time.perf_counter()
    try:
        seconds = model.compile(request)
    except torch._dynamo.exc.TorchDynamoException as error:
        raise UsageError(f"--use_torch_compile: the compiler failed ({str(error).splitlines()[0]}).") from error
    logger.info(
        "compiled the transformer's blocks in %.1f s (%.1f s with the calls that trigger it); not the decoder",
        seconds,
        time.perf_counter() - started,
    )
    return seconds


def _warm_up(config: RunConfig, model: VideoModel, request: VideoRequest, session: Session, *, progress: bool) -> None:
    for call in range(config.warmup_calls):
        logger.info("warm-up %d of %d", call + 1, config.warmup_calls)
        output = model.generate(request, timer=StageClock(session.state.device), progress=progress)
        if output is not None:
            deque(output.frames, maxlen=0)
        session.barrier("warm-up")


def _timed_iterations(
    config: RunConfig,
    model: VideoModel,
    requests: list[VideoRequest],
    session: Session,
    directory: Path,
    *,
    progress: bool,
) -> tuple[list[Sample], list[Path]]:
    """On rank 0 a sample of every request of every iteration, and the files of the last one."""
    state = session.state
    samples, paths = [], []
    for iteration in range(config.num_iterations):
        last = iteration == config.num_iterations - 1
        for indices in _rounds(len(requests), state.data_parallel_degree):
            save = functools.partial(save_video, directory, config, requests, session) if last else None
            profiled = config.profile and last and len(requests) - 1 in indices
            with trace(directory, rank=state.rank, device=state.device) if profiled else nullcontext():
                done = generate_round(model, requests, indices, iteration, session, progress=progress, save=save)
            for sample, saved in done:
                if saved is not None:
                    request = requests[sample.prompt_index]
                    sample = replace(sample, stage_seconds=sample.stage_seconds | saved.stage_seconds)
                    details = sidecar(config, model, request, saved.audio_sample_rate, sample)
                    write_json(saved.path.with_suffix(".json"), details)
                    logger.info("saved %s", saved.path)
                    paths.append(saved.path)
                samples.append(sample)
            session.barrier("round")
    return samples, paths


def _rounds(count: int, replicas: int) -> Iterator[range]:
    """Prompts that are made at the same time, one a replica."""
    for first in range(0, count, replicas):
        yield range(first, min(first + replicas, count))


def generate_round(
    model: VideoModel,
    requests: list[VideoRequest],
    indices: range,
    iteration: int,
    session: Session,
    *,
    progress: bool,
    save: Save | None,
) -> list[tuple[Sample, Saved | None]]:
    """One request on each replica; on rank 0 the samples (slowest rank), and with `save` all videos are written."""
    state = session.state
    output, sample, saved = None, None, None
    if state.data_parallel_rank < len(indices):
        index = indices[state.data_parallel_rank]
        clock = StageClock(state.device)
        reset_peak_memory(state.device)
        output = model.generate(requests[index], timer=clock, progress=progress)
        if output is not None and save is not None and state.rank == 0:
            saved = save(index, output, clock.seconds)
        elif output is not None and save is not None:
            output = replace(output, frames=list(output.frames))
        elif output is not None:
            deque(output.frames, maxlen=0)
        sample = Sample(iteration, index, dict(clock.seconds), (peak_memory_bytes(state.device),))
    gathered = session.gather_objects(sample)
    if save is not None and state.data_parallel_rank and output is not None:
        send_video(output, state)
    if state.rank != 0:
        return []
    results: list[tuple[Sample, Saved | None]] = []
    for replica, index in enumerate(indices):
        leader = replica * state.sequence_degree
        if replica and save is not None:
            saved = save(index, receive_video(leader, state), {})
        results.append((slowest(gathered[leader : leader + state.sequence_degree]), saved))
    return results


def _silence_loading_bars() -> None:
    from diffusers.utils import logging as diffusers_logging
    from transformers.utils import logging as transformers_logging

    diffusers_logging.disable_progress_bar()
    transformers_logging.disable_progress_bar()


def make_requests(config: RunConfig) -> list[VideoRequest]:
    """A request for each prompt, each with the same seed and the same image."""
    image = None
    if config.input_images:
        image = load_image(
            config.input_images[0], height=config.height, width=config.width, resize=config.resize_input_images
        )
    return [
        VideoRequest(
            prompt=prompt,
            negative_prompt=negative,
            image=image,
            height=config.height,
            width=config.width,
            num_frames=config.num_frames,
            frame_rate=config.frame_rate,
            num_inference_steps=config.num_inference_steps,
            guidance_scale=config.guidance_scale,
            max_sequence_length=config.max_sequence_length,
            seed=config.seed,
        )
        for prompt, negative in zip(config.prompts, config.negative_prompts, strict=True)
    ]


def sidecar(
    config: RunConfig, model: VideoModel, request: VideoRequest, audio_sample_rate: int, sample: Sample
) -> dict[str, Any]:
    """Everything needed to make the video again (`--from_json`), and what it took."""
    images = tuple(image if "://" in image else _absolute(image) for image in config.input_images)
    folder = split_folder(config.model)[0]
    described = model.describe()
    again = replace(
        config,
        model=config.model.replace(str(folder), _absolute(folder)) if folder.is_dir() else config.model,
        revision=None if described["random_weights"] else described["revision"],
        prompt=(request.prompt,),
        negative_prompt=(request.negative_prompt,),
        input_images=images,
        num_iterations=1,
        warmup_calls=0,
        data_parallel_degree=1,
        profile=False,
    )
    return {
        **environment(torch.device(config.device)),
        "model": described,
        "config": again.to_json(),
        "image_sha256": hashlib.sha256(request.image.tobytes()).hexdigest() if request.image else None,
        "timings": sample.to_json(),
        "audio_sample_rate_hz": audio_sample_rate,
    }


def _absolute(path: str | Path) -> str:
    return str(Path(path).expanduser().resolve())
