"""Which schedule is faster on this device, where configs/<arch>.json does not know: measured once, then remembered.

Happens at the first use of a kernel size, about a second, never inside a run's loop; the winner is kept in the user's
cache (XDG_CACHE_HOME or ~/.cache) by device, Triton version and content of the config.
"""

import functools
import hashlib
import json
import logging
import os
import statistics
from collections.abc import Callable
from pathlib import Path

import torch

from layers.neighborhood_attention.configs import ArchConfig, RowConfig, TileConfig

logger = logging.getLogger(__name__)


@functools.cache
def faster_schedule(
    arch: ArchConfig,
    device: torch.device,
    kernel_size: tuple[int, int, int],
    head_dim: int,
    dtype: torch.dtype,
    *,
    attend: Callable[..., torch.Tensor],
    triton: str,
) -> str:
    """'row' or 'tile'; a kernel too wide for row is 'tile' without a measurement.

    `attend` is na3d_flash_attn, `triton` the version that compiles it.
    """
    tile = arch.tile(kernel_size, head_dim)
    try:
        row = arch.row(kernel_size, head_dim)
    except ValueError as error:
        logger.info("neighborhood attention: tile for %s: %s", kernel_size, error)
        return "tile"
    identity = (torch.cuda.get_device_name(device), triton, kernel_size, head_dim, str(dtype), row, tile)
    key = hashlib.sha256(repr(identity).encode()).hexdigest()[:24]
    path = cache_path()
    known = _read(path)
    if key not in known:
        times = {
            name: _milliseconds(attend, config, device, kernel_size, head_dim, dtype)
            for name, config in (("row", row), ("tile", tile))
        }
        known = {**_read(path), key: min(times, key=lambda name: times[name])}
        _write(path, known)
        logger.info(
            "neighborhood attention: %s for %s on %s (row %.3f ms, tile %.3f ms; kept in %s)",
            known[key], kernel_size, identity[0], times["row"], times["tile"], path,
        )  # fmt: skip
    return known[key]


def cache_path() -> Path:
    """Where the winners are kept."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "neighborhood_attention" / "schedules.json"


def _read(path: Path) -> dict[str, str]:
    try:
        content = json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        logger.warning("neighborhood attention: cannot read %s (%s); measuring again", path, error)
        return {}
    return {key: value for key, value in content.items() if value in ("row", "tile")}


def _write(path: Path, known: dict[str, str]) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(f".{os.getpid()}")
        temporary.write_text(json.dumps(known))
        temporary.replace(path)  # whole or not at all: ranks of one node may write together
    except OSError as error:
        logger.warning("neighborhood attention: cannot write %s (%s); the next run measures again", path, error)


def device_milliseconds(call: Callable[[], object]) -> float:
    """Of one call on the current device, without the host's launches."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(1_000_000)  # half a millisecond in which the host runs ahead: its launches are not timed
    start.record()
    call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def _milliseconds(
    attend: Callable[..., torch.Tensor],
    config: RowConfig | TileConfig,
    device: torch.device,
    kernel_size: tuple[int, int, int],
    head_dim: int,
    dtype: torch.dtype,
) -> float:
    """Median of a few calls on a grid of some thousand blocks."""
    grid = [max(kernel, length) for kernel, length in zip(kernel_size, (16, 48, 48), strict=True)]
    generator = torch.Generator(device).manual_seed(0)
    q, k, v = (
        torch.randn(1, *grid, 4, head_dim, device=device, generator=generator).to(dtype) * scale
        for scale in (head_dim**-0.5, 1.0, 1.0)
    )
    with torch.cuda.device(device):  # events and the pause go to the current device, whatever the tensors' is
        times = [device_milliseconds(lambda: attend(q, k, v, kernel_size, config=config)) for _ in range(7)]
    return statistics.median(times[2:])
