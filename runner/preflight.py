"""Last stop before anything is loaded: the config against this machine, and the memory estimate against its memory."""

import os
from collections.abc import Mapping
from typing import Any

import psutil
import torch

from runner.checks import check
from runner.config import RunConfig
from runner.errors import UsageError
from runner.plan import memory_problem, memory_request, plan
from runner_models.api import SetupError
from runner_models.ltx2.load import check_folder, read_config
from runner_models.ltx2.memory import estimate


def preflight(config: RunConfig, *, environ: Mapping[str, str] = os.environ) -> RunConfig:
    """Check the run, all but its memory, against this machine; nothing is loaded, downloaded or written.

    Args:
        config: from the command line.
        environ: where torchrun's WORLD_SIZE and LOCAL_WORLD_SIZE stand; one process without them.

    Returns:
        The config with device and dtype settled.

    Raises:
        UsageError: what `runner.checks.check` finds, or a checkpoint folder that cannot be used.
    """
    try:
        check_folder(config.model, config.recipe, load_format=config.load_format)
        transformer = read_config("transformer", config.model, config.recipe, load_format=config.load_format)
    except SetupError as error:
        raise UsageError(str(error)) from error
    return check(
        config,
        world_size=int(environ.get("WORLD_SIZE", "1")),
        local_world_size=int(environ.get("LOCAL_WORLD_SIZE", "1")),
        gpu_count=torch.cuda.device_count() if torch.cuda.is_available() else 0,
        num_heads=transformer["num_attention_heads"],
    )


def check_memory(config: RunConfig, *, environ: Mapping[str, str] = os.environ) -> None:
    """Refuse a request that this rank's memory cannot hold; `config` is checked. Ranks may differ: call it on each.

    Raises:
        UsageError: with the estimate, what is free, and what would fit.
    """
    problem = _memory_problem(config, available_bytes(config, environ=environ))
    if problem:
        raise UsageError(problem)


def make_plan(config: RunConfig, *, environ: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """The checked plan with memory filled in, for --dry_run; what does not fit here is a line of it and no error."""
    config = preflight(config, environ=environ)
    available = available_bytes(config, environ=environ)
    misfit = _memory_problem(config, available)
    memory = estimate(config.recipe, **memory_request(config))
    return plan(config, memory_bytes=memory, available_bytes=available, misfit=misfit)


def _memory_problem(config: RunConfig, available: int) -> str | None:
    try:
        return memory_problem(config, estimate=estimate, available_bytes=available)
    except SetupError as error:
        raise UsageError(str(error)) from error


def available_bytes(config: RunConfig, *, environ: Mapping[str, str] = os.environ) -> int:
    """Free memory of this rank's GPU, or its share of the machine's free memory; `config` is checked."""
    if config.device == "cuda":
        return torch.cuda.mem_get_info(int(environ.get("LOCAL_RANK", "0")))[0]
    return psutil.virtual_memory().available // int(environ.get("LOCAL_WORLD_SIZE", "1"))
