"""One run: check, load once, warm up, time every request, save the videos of the last iteration."""

import functools
import hashlib
import logging
import platform
import subprocess
import sys
import time
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from runner.config import RunConfig
from runner.media import VideoWriter, load_image
from runner.metrics import (
    Sample,
    StageClock,
    device_name,
    peak_memory_bytes,
    reset_peak_memory,
    summarise,
    summary_table,
)
from runner.sidecar import check_output_directory, output_path, write_json
from runner_models import load_model
from runner_models.api import VideoModel, VideoOutput, VideoRequest

logger = logging.getLogger(__name__)

_VERSIONED = ("torch", "triton", "diffusers", "transformers", "xfuser", "yunchang", "av")
_BYTES_PER_PIXEL = 0.5
"""Room to ask for: H.264 at crf 12 stays under 4 bits a pixel even on noise (measured on the tiny model: 3.4)."""


def run(config: RunConfig) -> list[Path]:
    """Make every video of `config` and return the paths of the mp4 files.

    Raises:
        UsageError, CheckpointError: what the user can mend, before any weight is read.
        OSError: a result that could not be written.
    """
    requests = make_requests(config)
    pixels = config.height * config.width * config.num_frames
    directory = check_output_directory(
        config.output_directory, needed_bytes=int(len(requests) * pixels * _BYTES_PER_PIXEL)
    )
    device = torch.device(config.device)
    progress = sys.stderr.isatty()
    if not progress:
        _silence_loading_bars()
    started = time.perf_counter()
    model = load_model(
        config.model,
        device=config.device,
        dtype=config.dtype,
        load_format=config.load_format,
        offload=config.enable_model_cpu_offload,
    )
    load_seconds = time.perf_counter() - started
    logger.info("loaded %s in %.1f s on %s", config.model, load_seconds, device_name(device))
    for call in range(config.warmup_calls):
        logger.info("warm-up %d of %d", call + 1, config.warmup_calls)
        model.generate(requests[0], timer=StageClock(device), progress=progress)

    samples, paths = [], []
    for iteration in range(config.num_iterations):
        for index, request in enumerate(requests):
            clock = StageClock(device)
            reset_peak_memory(device)
            output = model.generate(request, timer=clock, progress=progress)
            if iteration == config.num_iterations - 1:
                with clock("mux"):
                    path = _save(directory, config.output_stem(index), request, output)
                paths.append(path)
            sample = Sample(iteration, index, dict(clock.seconds), peak_memory_bytes(device))
            samples.append(sample)
            if iteration == config.num_iterations - 1:
                write_json(path.with_suffix(".json"), sidecar(config, model, request, output, sample))
                logger.info("saved %s", path)
    write_json(
        directory / "metrics.json",
        {
            **environment(device),
            "model": model.describe(),
            "config": config.to_json(),
            "load_seconds": load_seconds,
            "iterations": [sample.to_json() for sample in samples],
            "summary": summarise(samples),
        },
    )
    logger.info("timings, also in %s:\n%s", directory / "metrics.json", summary_table(samples))
    return paths


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


def _save(directory: Path, stem: str, request: VideoRequest, output: VideoOutput) -> Path:
    path = output_path(directory, stem)
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
    return path


def sidecar(
    config: RunConfig, model: VideoModel, request: VideoRequest, output: VideoOutput, sample: Sample
) -> dict[str, Any]:
    """Everything needed to make the video again (`--from_json`), and what it took."""
    images = tuple(image if "://" in image else str(Path(image).resolve()) for image in config.input_images)
    again = replace(
        config,
        prompt=(request.prompt,),
        negative_prompt=(request.negative_prompt,),
        input_images=images,
        num_iterations=1,
        warmup_calls=0,
    )
    return {
        **environment(torch.device(config.device)),
        "model": model.describe(),
        "config": again.to_json(),
        "image_sha256": hashlib.sha256(request.image.tobytes()).hexdigest() if request.image else None,
        "timings": sample.to_json(),
        "audio_sample_rate_hz": output.audio_sample_rate,
    }


def environment(device: torch.device) -> dict[str, Any]:
    """Device, versions, commit, command and date, in every json this program writes."""
    versions = {"python": platform.python_version(), "cuda": torch.version.cuda, "hip": torch.version.hip}
    for package in _VERSIONED:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = None
    return {
        "device": device_name(device),
        "versions": versions,
        "commit": _commit(),
        "command": sys.argv,
        "date": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }


@functools.cache
def _commit() -> str | None:
    """The commit of this source tree, with "-dirty" after local changes; None for an installed package."""
    root = Path(__file__).resolve().parents[1]
    if not (root / ".git").exists():
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError) as error:
        logger.warning("commit unknown: %s", error)
        return None
