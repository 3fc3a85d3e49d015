"""`python -m runner --doctor`: would this run work here, and if not, why.

It takes the flags of a run. What is not given: the model is LTX-2.5 where torch sees a GPU and, where it sees none, the
run of the demo (tiny, 768x512, 25 frames); the task is t2v, or i2v with an image; a prompt stands in. One process
answers for all ranks of this machine. With --attention_backend that one alone is tried, which is faster. Nothing is
downloaded, and nothing stays on the disk.

torch and the rest are imported only after it is known that they can be.
"""

from __future__ import annotations

import importlib
import logging
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from importlib.metadata import PackageNotFoundError, requires, version
from typing import TYPE_CHECKING, Any

from runner.config import RunConfig
from runner.doctor_text import render, without_passwords
from runner.errors import UsageError

if TYPE_CHECKING:
    from runner.doctor_checks import Answer

__all__ = ["examine", "import_problems", "render", "variables"]

# What a run imports in any case; the second of diffusers is where a wrong transformers shows.
MODULES = ("torch", "diffusers", "diffusers.pipelines.ltx2", "transformers", "accelerate", "yunchang", "av", "imageio")
# What a package that is there but broken raises as it is imported (layers.neighborhood_attention.backend has the like).
_IMPORT_ERRORS = (ImportError, OSError, RuntimeError, AttributeError, AssertionError, KeyError, TypeError, ValueError)

DEMO = {"model": "tiny", "height": 512, "width": 768, "num_frames": 25}
"""The run that is asked about on a machine without a GPU."""

_NAMES = (
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS"),
    *("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "GPU_ARCHS", "XDG_CACHE_HOME"),
    *("DIFFUSERS_DISABLE_REMOTE_CODE", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "LD_LIBRARY_PATH", "PYTHONPATH"),
)
_PREFIXES = (
    "HF_",
    "LTX_RUNNER_",
    "PYTORCH_",
    "TORCH_",
    "TORCHINDUCTOR_",
    "TRITON_",
    "NCCL_",
    "RCCL_",
    "HSA_",
    "AITER_",
)
_SECRET = re.compile("TOKEN|SECRET|PASSWORD|CREDENTIAL|KEY|PROXY")
_OPTIONAL = ("triton", "xfuser", "natten", "amd-aiter", "aiter", "kernels")


def examine(values: Mapping[str, Any], *, environ: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """The report on a run, in JSON types.

    Args:
        values: typed values by flag name, from `runner.cli.read`; all may be missing.
        environ: with torchrun's variables under torchrun; the degrees stand for them elsewhere.

    Returns:
        `works`, `problems` (empty where it works), `run`, `versions`, `variables`, and one entry a question.
    """
    report: dict[str, Any] = {"works": False, "versions": _versions(), "variables": variables(environ)}
    # Packages that announce themselves on stdout must not end up in the json.
    with _quiet(), redirect_stdout(sys.stderr):
        report["problems"] = problems = import_problems()
        if problems:
            return report
        config = _question(values, report, problems)
        if config is not None:
            _answers(config, report, problems, environ)
    report["works"] = not problems
    return report


@contextmanager
def _quiet() -> Iterator[None]:
    """What the packages would log of their choices is in the report."""
    loggers = [logging.getLogger(package) for package in ("runner", "runner_models", "layers")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _question(values: Mapping[str, Any], report: dict[str, Any], problems: list[str]) -> RunConfig | None:
    """The run that is meant, device and dtype settled; None for a model or task that does not exist."""
    import torch

    from runner import doctor_checks

    report["devices"] = doctor_checks.devices()
    gpu = torch.cuda.is_available() and values.get("device") != "cpu"
    defaults = {"model": "LTX-2.5"} if gpu or "model" in values else DEMO
    task = "i2v" if values.get("input_images") else "t2v"
    filled = {**defaults, "task": task, "prompt": ("a cat",), **values}
    try:
        config = RunConfig.from_values(filled)
    except UsageError as error:
        problems.append(str(error))
        return None
    report["run"] = {name: getattr(config, name) for name in ("model", "task", "height", "width", "num_frames")}
    return config


def _answers(config: RunConfig, report: dict[str, Any], problems: list[str], environ: Mapping[str, str]) -> None:
    import torch

    from runner import doctor_checks as checks
    from runner.environment import environment
    from runner.preflight import preflight
    from runner_models.api import SetupError

    ranks = config.sequence_degree * config.data_parallel_degree
    if "WORLD_SIZE" not in environ:
        environ = {**environ, "WORLD_SIZE": str(max(ranks, 1)), "LOCAL_WORLD_SIZE": str(max(ranks, 1))}
    local_ranks = int(environ.get("LOCAL_WORLD_SIZE", "1"))
    try:
        config, valid = preflight(config, environ=environ), True
    except UsageError as error:
        problems += str(error).splitlines()
        config, valid = _settled(config), False
    report["run"] |= {"device": config.device, "dtype": config.dtype, "ranks": ranks}
    origin = environment(torch.device(config.device))
    report |= origin | {"versions": {**origin["versions"], **report["versions"]}}
    report["communication"] = checks.communication(config.device)
    if ranks > 1 and not report["communication"]["available"]:
        problems.append(f"{ranks} ranks need {report['communication']['library']}, which this torch has not.")
    questions: dict[str, Callable[[], Answer]] = {
        "attention_backends": lambda: checks.attention_backends(config),
        "decoder_attention": lambda: checks.decoder_attentions(config),
        "codecs": checks.codecs,
    }
    if valid:
        questions |= {
            "memory": lambda: checks.memory(config, environ=environ, local_ranks=local_ranks),
            "checkpoint": lambda: checks.checkpoint(config),
            "output": lambda: checks.files(config),
        }
    for name, ask in questions.items():
        try:
            report[name], found = ask()
        except SetupError as error:  # a checkpoint folder that cannot be read: `preflight` has said so
            found = [str(error)] if valid else []
        problems += found


def _settled(config: RunConfig) -> RunConfig:
    """Device and dtype as a run would have them, for a config that cannot run."""
    import dataclasses

    import torch

    device = "cuda" if torch.cuda.is_available() and config.device != "cpu" else "cpu"
    dtype = {"cuda": "bfloat16", "cpu": "float32"}[device] if config.dtype == "auto" else config.dtype
    return dataclasses.replace(config, device=device, dtype=dtype)


def import_problems(modules: tuple[str, ...] = MODULES) -> list[str]:
    """One line for each cause that keeps modules from being imported, in its own words."""
    causes: dict[str, list[str]] = {}
    for name in modules:
        try:
            importlib.import_module(name)
        except _IMPORT_ERRORS as error:
            words = (str(error).splitlines() or [""])[0]
            causes.setdefault(f"{type(error).__name__}: {words}", []).append(name)
    return [f"{', '.join(names)} cannot be imported ({words}); install it again." for words, names in causes.items()]


def variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Variables that change a run. Of tokens and proxies only that they are set, and no password of a URL."""
    found = {}
    for name, value in sorted(environ.items()):
        if name.upper() in _NAMES or name.startswith(_PREFIXES):
            secret = _SECRET.search(name.upper())
            found[name] = "(set)" if secret else without_passwords(value)
    return found


def _versions() -> dict[str, str | None]:
    """Of what the project needs, by its own metadata, and of what it may use."""
    try:
        needed = [
            re.split(r"[^A-Za-z0-9_-]", line)[0] for line in requires("ltx-runner") or () if "extra ==" not in line
        ]
    except PackageNotFoundError:
        needed = [name for name in MODULES if "." not in name]
    versions: dict[str, str | None] = {}
    for name in (*needed, *_OPTIONAL):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = None
    return versions
