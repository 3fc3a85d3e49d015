"""Launch parameters of the kernels, one json per architecture in configs/. Nothing is tuned at run time.

A json is {"arch", "evidence", "schedules", "tile", "row"}. The last three are lists of rules; the first that matches a
call is used. "schedules" says which schedule a kernel size takes ("race": measure once on the device at hand, see
race.py). scripts/tune_na3d.py rewrites the file of the machine it runs on.
"""

import functools
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch

ARCHS = ("gfx942", "gfx950", "sm80", "sm90", "sm100", "default")
SCHEDULES = ("row", "tile", "race")
FOLDER = Path(__file__).parent / "configs"
WALK_ORDERS = {"t": (0, 1, 2), "h": (1, 0, 2), "w": (2, 0, 1)}  # the axes as a walk takes them, its own first


@dataclass(frozen=True)
class TileConfig:
    """Blocks of `tile` = (T, H, W) queries against blocks of `block_kv` keys.

    skip_exp: PTX jump over planes that a warp cannot see; q_in_registers, partial_sums, max_registers: see
    kernel_tile.py. walk: the axis, "t", "h" or "w", along which kernel_tile_hopper.py goes where it fits a call (bf16
    on sm90), with max_registers; the others then serve calls that it does not fit. waves_per_eu and mfma_size
    (matrix_instr_nonkdim) go to the AMD compiler, 0 leaves them to it.
    """

    tile: tuple[int, int, int]
    block_kv: int
    warps: int
    stages: int
    skip_exp: bool = False
    q_in_registers: bool = False
    partial_sums: bool = False
    max_registers: int = 0
    waves_per_eu: int = 0
    mfma_size: int = 0
    walk: str = ""

    def __post_init__(self) -> None:
        queries = math.prod(self.tile)
        for name, value in (("tile queries", queries), ("block_kv", self.block_kv)):
            if value < 16 or value & (value - 1):
                raise ValueError(f"{name} {value} of {self} must be a power of two, 16 or more")
        if self.skip_exp:
            one_plane = self.tile[1] * self.tile[2] % 16 == 0 and queries == 16 * self.warps
            if not one_plane or self.scores_per_thread not in (16, 32):
                raise ValueError(
                    f"skip_exp needs 16 queries of one T plane per warp and 16 or 32 scores per thread; got {self}"
                )
        if self.walk and not self.can_walk(self.walk):
            raise ValueError(
                'walk must be "t", "h" or "w", and needs skip_exp, block_kv 64 and 64 queries in a tile with 2 or 4 of '
                f"them along that axis and sides that sum to at most 16; got {self}"
            )

    def can_walk(self, axis: str) -> bool:
        """Whether kernel_tile_hopper.py takes these blocks along `axis`."""
        if axis not in WALK_ORDERS or not self.skip_exp or not math.prod(self.tile) == self.block_kv == 64:
            return False
        return sum(self.tile) <= 16 and self.tile[WALK_ORDERS[axis][0]] in (2, 4)

    @property
    def scores_per_thread(self) -> int:
        return math.prod(self.tile) * self.block_kv // (32 * self.warps)

    @property
    def mask_channels(self) -> int:
        """Inner length of the mask product: a channel per row and per column of the tile, 16 at least for the dot."""
        return max(16, 1 << (self.tile[1] + self.tile[2] - 1).bit_length())

    def pads_rest(self, kernel_size: Sequence[int]) -> bool:
        """Whether (h, w) cells left over after whole key blocks take a padded block rather than being packed.

        A packed block costs 1.3 of a whole one (estimated: its offsets and mask are made anew each step).
        """
        planes, rows, columns = (n + k - 1 for n, k in zip(self.tile, kernel_size, strict=True))
        rest = rows * columns % self.block_kv
        return rest > 0 and 1.3 * math.ceil(rest * planes / self.block_kv) >= planes


@dataclass(frozen=True)
class RowConfig:
    """`block_q` queries along W against rows of `block_kv` keys, for kernels up to `max_kernel_w` wide."""

    max_kernel_w: int
    block_q: int
    block_kv: int
    warps: int
    stages: int
    waves_per_eu: int = 0
    mfma_size: int = 0

    def __post_init__(self) -> None:
        for name, value in (("block_q", self.block_q), ("block_kv", self.block_kv)):
            if value < 16 or value & (value - 1):
                raise ValueError(f"{name} {value} of {self} must be a power of two, 16 or more")
        if self.block_kv < self.block_q + self.max_kernel_w - 1:
            raise ValueError(
                f"block_kv {self.block_kv} must cover block_q + max_kernel_w - 1 = "
                f"{self.block_q + self.max_kernel_w - 1} keys: {self}"
            )


@dataclass(frozen=True)
class _Rule:
    """What a rule of a json gives for calls of one kernel size (None: any) with head_dim up to a limit."""

    kernel_size: tuple[int, int, int] | None
    max_head_dim: int
    value: Any

    def matches(self, kernel_size: Sequence[int], head_dim: int) -> bool:
        return self.kernel_size in (None, tuple(kernel_size)) and head_dim <= self.max_head_dim


@dataclass(frozen=True)
class ArchConfig:
    """The content of one json: the first rule that matches a call decides; `evidence` says where rules come from."""

    arch: str
    evidence: str
    schedules: tuple[_Rule, ...]
    tiles: tuple[_Rule, ...]
    rows: tuple[_Rule, ...]

    def schedule(self, kernel_size: Sequence[int], head_dim: int) -> str:
        return next(rule.value for rule in self.schedules if rule.matches(kernel_size, head_dim))

    def tile(self, kernel_size: Sequence[int], head_dim: int) -> TileConfig:
        return next(rule.value for rule in self.tiles if rule.matches(kernel_size, head_dim))

    def row(self, kernel_size: Sequence[int], head_dim: int) -> RowConfig:
        """Raises ValueError, naming the limit, where no config is wide enough."""
        configs: list[RowConfig] = [rule.value for rule in self.rows if rule.matches(kernel_size, head_dim)]
        for config in configs:
            if kernel_size[2] <= config.max_kernel_w:
                return config
        widest = max(config.max_kernel_w for config in configs)
        raise ValueError(f"schedule row of {self.arch} takes kernels up to {widest} wide; got {kernel_size[2]}")


def parse(document: dict[str, Any]) -> ArchConfig:
    """An ArchConfig out of a json document; raises ValueError for a config that could not run."""

    def rules(name: str, make: Any) -> tuple[_Rule, ...]:
        found = []
        for entry in document[name]:
            kernel = entry.get("kernel_size")
            rest = {key: value for key, value in entry.items() if key not in ("kernel_size", "max_head_dim")}
            found.append(_Rule(tuple(kernel) if kernel else None, entry.get("max_head_dim", 256), make(rest)))
        if not any(rule.kernel_size is None and rule.max_head_dim == 256 for rule in found):
            raise ValueError(f"{document['arch']}: the last rule of {name!r} must match every call")
        return tuple(found)

    def schedule(entry: dict[str, Any]) -> str:
        if entry["schedule"] not in SCHEDULES:
            raise ValueError(f"schedule {entry['schedule']!r} must be one of {SCHEDULES}")
        return str(entry["schedule"])

    def tile(entry: dict[str, Any]) -> TileConfig:
        return TileConfig(**{**entry, "tile": tuple(entry["tile"])})

    return ArchConfig(
        document["arch"],
        document["evidence"],
        rules("schedules", schedule),
        rules("tile", tile),
        rules("row", lambda entry: RowConfig(**entry)),
    )


@functools.cache
def load(arch: str) -> ArchConfig:
    """The config of one of ARCHS."""
    return parse(json.loads((FOLDER / f"{arch}.json").read_text()))


@functools.cache
def arch_of(device: torch.device) -> str:
    """Which json serves this device."""
    if device.type != "cuda":
        return "default"
    if torch.version.hip is not None:
        name = torch.cuda.get_device_properties(device).gcnArchName.split(":")[0]
    else:
        major = torch.cuda.get_device_capability(device)[0]
        name = {8: "sm80", 9: "sm90", 10: "sm100"}.get(major, "default")
    return name if name in ARCHS else "default"


def as_entry(config: TileConfig | RowConfig) -> dict[str, Any]:
    """A config as a json entry, without the fields that have their default value."""
    values = {f.name: getattr(config, f.name) for f in fields(config)}
    return {name: value for name, value in values.items() if value or isinstance(value, tuple)}


def as_text(document: dict[str, Any]) -> str:
    """A config document as text, one rule a line."""

    def lines(value: Any) -> str:
        if not isinstance(value, list):
            return json.dumps(value)
        return "[\n" + ",\n".join(f"    {json.dumps(rule)}" for rule in value) + "\n  ]"

    return "{\n" + ",\n".join(f"  {json.dumps(key)}: {lines(value)}" for key, value in document.items()) + "\n}\n"
