"""One run: check, load once, warm up, time every request, save the videos of the last iteration.

Every rank runs this. With data parallelism prompt i goes to replica i % data_parallel_degree. Only rank 0 writes files.
"""

import hashlib
import logging
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from layers.parallel_state import ParallelState
from runner.config import RunConfig
from runner.distributed import Session
from runner.environment import environment
from runner.media import VideoWriter, load_image
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
from runner.sidecar import check_output_directory, output_path, partial_path, write_json
from runner_models import load_model, split_folder
from runner_models.api import VideoModel, VideoOutput, VideoRequest
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
    requests = make_requests(config)
    if state.rank == 0:
        pixels = config.height * config.width * config.num_frames
        check_output_directory(config.output_directory, needed_bytes=int(len(requests) * pixels * _BYTES_PER_PIXEL))
    progress = state.rank == 0 and sys.stderr.isatty()
    if not progress:
        _silence_loading_bars()
    attentions = choose_attentions(
        config.model,
        config.recipe,
        load_format=config.load_format,
        state=state,
        dtype=getattr(torch, config.dtype),
        attention_backend=config.attention_backend,
        decoder_attention=config.decoder_attention,
    )
    source = _resolve(config, session)
    started = time.perf_counter()
    model = load_model(
        config.model,
        dtype=config.dtype,
        load_format=config.load_format,
        offload=config.enable_model_cpu_offload,
        state=state,
        source=source,
        attentions=attentions,
    )
    session.barrier("loaded")
    load_seconds = time.perf_counter() - started
    logger.info("loaded %s in %.1f s on %s", config.model, load_seconds, device_name(state.device))
    if state.sequence_degree > 1:
        logger.info("one of %d ranks decodes; --use_parallel_vae will spread it, once supported", state.sequence_degree)
    model.prepare(requests[0])
    compile_seconds = _compile(config, model, requests[0])
    for call in range(config.warmup_calls):
        logger.info("warm-up %d of %d", call + 1, config.warmup_calls)
        model.generate(requests[0], timer=StageClock(state.device), progress=progress)
        session.barrier("warm-up")

    directory = Path(config.output_directory).expanduser()
    samples, paths = [], []
    for iteration in range(config.num_iterations):
        last = iteration == config.num_iterations - 1
        for indices in _rounds(len(requests), state.data_parallel_degree):
            done = _generate(model, requests, indices, iteration, session, progress=progress, deliver=last)
            for sample, output in done:
                if last:
                    assert output is not None
                    request = requests[sample.prompt_index]
                    stem = config.output_stem(sample.prompt_index)
                    path, sample = _save(directory, stem, request, output, sample, session)
                    write_json(path.with_suffix(".json"), sidecar(config, model, request, output, sample))
                    logger.info("saved %s", path)
                    paths.append(path)
                samples.append(sample)
            session.barrier("round")
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


def _resolve(config: RunConfig, session: Session) -> Source:
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
    seconds = model.compile(request)
    logger.info(
        "compiled the transformer's blocks in %.1f s (%.1f s with the calls that trigger it); not the decoder",
        seconds,
        time.perf_counter() - started,
    )
    return seconds


def _rounds(count: int, replicas: int) -> Iterator[range]:
    """Prompts that are made at the same time, one a replica."""
    for first in range(0, count, replicas):
        yield range(first, min(first + replicas, count))


def _generate(
    model: VideoModel,
    requests: list[VideoRequest],
    indices: range,
    iteration: int,
    session: Session,
    *,
    progress: bool,
    deliver: bool,
) -> list[tuple[Sample, VideoOutput | None]]:
    """One request on each replica; on rank 0 the samples (slowest rank) and, with `deliver`, the videos of all."""
    state = session.state
    output, sample = None, None
    if state.data_parallel_rank < len(indices):
        index = indices[state.data_parallel_rank]
        clock = StageClock(state.device)
        reset_peak_memory(state.device)
        output = model.generate(requests[index], timer=clock, progress=progress)
        sample = Sample(iteration, index, dict(clock.seconds), (peak_memory_bytes(state.device),))
    gathered = session.gather_objects(sample)
    if deliver and state.is_replica_leader and state.data_parallel_rank and output is not None:
        _send(output, state)
    if state.rank != 0:
        return []
    results: list[tuple[Sample, VideoOutput | None]] = []
    for replica in range(len(indices)):
        leader = replica * state.sequence_degree
        mine = gathered[leader : leader + state.sequence_degree]
        delivered = output if replica == 0 else _receive(leader, state) if deliver else None
        results.append((slowest(mine), delivered))
    return results


def _send(output: VideoOutput, state: ParallelState) -> None:
    """A replica's leader to rank 0, over the group of all leaders; on the CPU, so by gloo."""
    header = [(output.frames.shape, output.audio.shape, output.audio_sample_rate)]
    dist.send_object_list(header, dst=0, group=state.data_parallel_group, device=torch.device("cpu"))
    for tensor in (output.frames, output.audio):
        dist.send(tensor.contiguous(), dst=0, group=state.data_parallel_group)


def _receive(leader: int, state: ParallelState) -> VideoOutput:
    header: list[Any] = [None]
    dist.recv_object_list(header, src=leader, group=state.data_parallel_group, device=torch.device("cpu"))
    frames_shape, audio_shape, rate = header[0]
    output = VideoOutput(torch.empty(frames_shape, dtype=torch.uint8), torch.empty(audio_shape), rate)
    for tensor in (output.frames, output.audio):
        dist.recv(tensor, src=leader, group=state.data_parallel_group)
    return output


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


def _save(
    directory: Path, stem: str, request: VideoRequest, output: VideoOutput, sample: Sample, session: Session
) -> tuple[Path, Sample]:
    """Write the mp4 under a free name and add the seconds it took to the sample."""
    clock = StageClock(torch.device("cpu"))
    with clock("mux"):
        path = output_path(directory, stem)
        session.on_abort(lambda: partial_path(path).unlink(missing_ok=True))
        writer = VideoWriter(
            path,
            height=request.height,
            width=request.width,
            frame_rate=request.frame_rate,
            audio=output.audio,
            audio_sample_rate=output.audio_sample_rate,
        )
        with writer:
            writer.write(output.frames)
    return path, replace(sample, stage_seconds=sample.stage_seconds | clock.seconds)


def sidecar(
    config: RunConfig, model: VideoModel, request: VideoRequest, output: VideoOutput, sample: Sample
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
    )
    return {
        **environment(torch.device(config.device)),
        "model": described,
        "config": again.to_json(),
        "image_sha256": hashlib.sha256(request.image.tobytes()).hexdigest() if request.image else None,
        "timings": sample.to_json(),
        "audio_sample_rate_hz": output.audio_sample_rate,
    }


def _absolute(path: str | Path) -> str:
    return str(Path(path).expanduser().resolve())
