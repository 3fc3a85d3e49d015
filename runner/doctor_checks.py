"""What the doctor looks at, one function a question. Most give (JSON types for the report, what stops the run).

No list of backends, sizes or limits is kept here: each question is put to the code that a run would ask.
"""

import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import av
import psutil
import torch
import torch.distributed as dist

from layers.attention_backends import BackendStatus, available_backends, probe_backend, select_backend
from layers.neighborhood_attention.backend import architecture
from layers.neighborhood_attention.select import MAKERS
from runner.config import RunConfig
from runner.errors import UsageError, user_path
from runner.hub_access import cached_bytes, hub_access, hub_cache
from runner.media import VideoWriter, load_image
from runner.plan import memory_problem, memory_request
from runner.preflight import available_bytes
from runner.sizes import readable
from runner_models import HUB_REPOSITORY, TINY_NAMES
from runner_models.api import SetupError
from runner_models.ltx2.decoder_attention import select_decoder_attention
from runner_models.ltx2.load import local_folder, read_config, resolve
from runner_models.ltx2.memory import estimate
from runner_models.ltx2.tiny import cache_root

Answer = tuple[Any, list[str]]


def devices() -> list[dict[str, Any]]:
    """The processor, then every GPU that torch sees."""
    memory = psutil.virtual_memory()
    found: list[dict[str, Any]] = [
        {
            "name": "cpu",
            "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
            "memory_bytes": memory.total,
            "free_memory_bytes": memory.available,
        }
    ]
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        free, total = torch.cuda.mem_get_info(index)
        place = torch.device("cuda", index)
        gpu = {"name": torch.cuda.get_device_name(place), "architecture": architecture(place)}
        found.append({**gpu, "memory_bytes": total, "free_memory_bytes": free})
    return found


def communication(device: str) -> dict[str, Any]:
    """The library that ranks talk through: NCCL or RCCL between GPUs, gloo between processes on a CPU."""
    if device == "cpu":
        return {"library": "gloo", "version": None, "available": dist.is_available() and dist.is_gloo_available()}
    version = torch.cuda.nccl.version() if dist.is_nccl_available() else ()
    return {
        "library": "NCCL" if torch.version.hip is None else "RCCL",
        "version": ".".join(map(str, version)) or None,
        "available": dist.is_nccl_available(),
    }


def attention_backends(config: RunConfig) -> Answer:
    """Every name of --attention_backend, proven on the device; `config` is settled.

    Where one is given it alone is tried: some of the others are compiled when they are first used, which takes minutes.
    """
    device, dtype = torch.device(config.device), getattr(torch, config.dtype)
    transformer = read_config("transformer", config.model, config.recipe, load_format=config.load_format)
    head_dim = transformer["attention_head_dim"]
    problems, found = [], list[BackendStatus]()
    try:
        if config.attention_backend is not None or config.ring_degree > 1:
            needs_lse = config.ring_degree > 1
            named = select_backend(
                config.attention_backend, device=device, dtype=dtype, head_dim=head_dim, needs_lse=needs_lse
            )
            found = [probe_backend(named.name, device=device, dtype=dtype, head_dim=head_dim)]
    except ValueError as error:
        problems.append(str(error))
    if config.attention_backend is None or problems:
        found = available_backends(device, dtype=dtype, head_dim=head_dim)
    return [
        {"name": s.name, "usable": s.available, "log_sum_exp": s.returns_lse, "reason": s.reason or None} for s in found
    ], problems


def decoder_attentions(config: RunConfig) -> Answer:
    """Every name of --decoder_attention, in the order of choice; `config` is settled."""
    decoder = read_config("diffusion_decoder", config.model, config.recipe, load_format=config.load_format)
    options: dict[str, Any] = {
        "device": torch.device(config.device),
        "dtype": getattr(torch, config.dtype),
        "everywhere": lambda value: [value],
    }
    problems = []
    try:
        all_of_them = select_decoder_attention("fastest", decoder, **options)
    except SetupError as error:
        return [], [str(error)]
    usable = {backend.name: backend.detail for backend in all_of_them.attention.backends}
    if config.decoder_attention in MAKERS and config.decoder_attention not in usable:
        try:
            select_decoder_attention(config.decoder_attention, decoder, **options)
        except SetupError as error:
            problems.append(str(error))
    return [
        {
            "name": name,
            "usable": name in usable,
            "detail": usable.get(name) or None,
            "reason": all_of_them.refused.get(name),
        }
        for name in MAKERS
    ], problems


def codecs() -> Answer:
    """Write a small mp4 as a run does, and read back what is in it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "probe.mp4"
        sound = torch.zeros(2, 4800)
        try:
            with VideoWriter(path, height=64, width=64, frame_rate=24, audio=sound, audio_sample_rate=48000) as writer:
                writer.write(torch.zeros(2, 64, 64, 3, dtype=torch.uint8))
            with av.open(str(path)) as container:
                names = [stream.codec_context.name for stream in container.streams]
        except (OSError, ValueError, LookupError) as error:  # PyAV: an unknown codec is a ValueError
            return {"works": False}, [
                f"no mp4 can be written: {error}; reinstall av (pip install --force-reinstall av)."
            ]
    return {"works": True, "written": names, "ffmpeg": av.ffmpeg_version_info}, []


def memory(config: RunConfig, *, environ: Mapping[str, str], local_ranks: int) -> Answer:
    """What a rank needs against what the poorest of this machine's ranks may use; `config` is checked."""
    if config.device == "cuda":
        free = min(available_bytes(config, environ={"LOCAL_RANK": str(rank)}) for rank in range(local_ranks))
    else:
        free = available_bytes(config, environ=environ)
    needed = estimate(config.recipe, **memory_request(config))
    problem = memory_problem(config, estimate=estimate, available_bytes=free)
    return {"needed_bytes": needed, "available_bytes": free}, [problem] if problem else []


def checkpoint(config: RunConfig) -> Answer:
    """Where the weights come from, the disk they need, and what the hub says; the hub decides where it is needed."""
    hub = hub_access(revision=config.revision)
    report: dict[str, Any] = {"hub": hub.to_json()}
    folder = local_folder(config.model, load_format=config.load_format)
    if config.load_format == "dummy":
        return {**report, "source": "random weights", "cached": True}, []
    if folder is not None:
        return {**report, "source": str(folder), "cached": True}, []
    weights = estimate(config.recipe, **(memory_request(config) | {"dtype": "bfloat16"}))["weights"]
    problems = []
    if config.model in TINY_NAMES:
        place, needed, cached = cache_root(), 2 * weights, False  # kept in fp32
    else:
        place, cached = hub_cache(), _is_cached(config)
        needed = 0 if cached else max(0, weights - cached_bytes())
        if not cached and hub.access != "granted":
            problems.append(
                f"{HUB_REPOSITORY} is not in the cache and the hub's access is {hub.access} ({hub.reason}); "
                "--model tiny needs no weights."
            )
    free = shutil.disk_usage(_existing(place)).free
    if free < needed:
        problems.append(f"{place} has {readable(free)} free and the weights take {readable(needed)}.")
    disk = {"folder": str(place), "free_bytes": free, "needed_bytes": needed}
    return {**report, "source": config.model, "cached": cached, "disk": disk}, problems


def _is_cached(config: RunConfig) -> bool:
    try:
        resolve(config.model, config.recipe, load_format="auto", revision=config.revision, fetch=False)
    except SetupError:
        return False
    return True


def files(config: RunConfig) -> Answer:
    """The first frame, and the output folder; nothing is created."""
    try:
        for image in config.input_images:
            load_image(image, height=config.height, width=config.width, resize=config.resize_input_images)
        output = user_path(config.output_directory, f"--output_directory {config.output_directory}")
    except UsageError as error:
        return None, [str(error)]
    parent = _existing(output)
    try:
        with tempfile.TemporaryFile(dir=parent):
            pass
    except OSError as error:
        return None, [f"--output_directory {config.output_directory} cannot be written ({parent}: {error.strerror})."]
    return {"folder": str(output), "free_bytes": shutil.disk_usage(parent).free}, []


def _existing(path: Path) -> Path:
    """The path, or its nearest parent that exists."""
    path = path.absolute()
    return next(place for place in (path, *path.parents) if place.exists())
