"""What report.py shows: results of the bench scripts, each with its source."""

import dataclasses
import math
import types
from dataclasses import dataclass, field
from typing import Any, get_args, get_origin, get_type_hints

NOT_RECORDED = "not recorded"
SHOWN_VERSIONS = ("torch", "triton", "cuda", "hip", "diffusers", "transformers", "xfuser")


@dataclass(frozen=True)
class Source:
    """Where figures come from. `number` is their place in the list of sources."""

    number: int
    file: str
    device: str
    versions: tuple[tuple[str, str], ...]
    command: str
    commit: str
    date: str

    @property
    def version_line(self) -> str:
        """Those that move a figure."""
        return ", ".join(f"{name} {version}" for name, version in self.versions if name in SHOWN_VERSIONS)


@dataclass(frozen=True)
class Spread:
    """Median, least and most of one thing, in its own unit, over `runs` (0: not recorded)."""

    median: float
    low: float
    high: float
    runs: int = 0


@dataclass(frozen=True)
class Row:
    """One variant of one file. `stages` in order, seconds; `peaks` GiB by rank; `error` in place of a time."""

    source: Source
    variant: str
    ranks: int = 1
    work: str = ""
    time: Spread | None = None
    stages: dict[str, Spread] = field(default_factory=dict)
    peaks: tuple[float, ...] = ()
    relative_l2: float | None = None
    runner: str = ""
    decode: str = ""
    to_file: Spread | None = None
    error: str = ""


@dataclass(frozen=True)
class RooflineRow:
    """One stage of a decode: bytes and FLOPs by counting, the floor they set, and what was measured, milliseconds."""

    stage: str
    bytes: float | None
    flops: float | None
    floor_ms: float
    measured_ms: float | None


@dataclass(frozen=True)
class DecodeResult:
    """bench_decode.py. `stage_ms` by way of decoding; `shares` are (ranks, seconds, GiB) of one rank, by a model."""

    source: Source
    work: str
    rows: list[Row]
    stage_ms: dict[str, dict[str, float]]
    shares: list[tuple[int, float, float]]
    roofline: dict[str, list[RooflineRow]]


@dataclass(frozen=True)
class TransformerRow:
    """One forward of bench_transformer.py; `time` in milliseconds."""

    source: Source
    stage: int
    variant: str
    ranks: int
    video_tokens: int
    time: Spread
    relative_l2: float | None


@dataclass(frozen=True)
class KernelRow:
    """One variant at one shape of bench_na3d.py; `time` in milliseconds, None where it was wrong."""

    source: Source
    grid: str
    kernel: str
    variant: str
    layout: str
    time: Spread | None
    useful_tflops: float
    of_dense: float
    relative_l2: float


@dataclass(frozen=True)
class OpRow:
    """One fused op of bench_fused.py; in milliseconds `time`, and what `bytes` and `flops` alone would take."""

    op: str
    shape: str
    time: Spread | None
    bytes: float = 0.0
    flops: float = 0.0
    bytes_ms: float = 0.0
    flops_ms: float = 0.0
    relative_l2: float | None = None
    error: str = ""


@dataclass(frozen=True)
class FusedResult:
    """bench_fused.py, with the rates that were measured in the same run: bytes and FLOP a second."""

    source: Source
    copy_rate: float
    flop_rate: float
    rows: list[OpRow]


def check_types(value: Any, hint: Any, place: str = "it") -> None:
    """A value read from a json against its annotation, through dataclasses and containers.

    Raises:
        ValueError: another type, a number that is not finite, or a time of 0 in a row.
    """
    origin, inner = get_origin(hint), get_args(hint)
    if origin is types.UnionType:
        if value is not None:
            check_types(value, next(option for option in inner if option is not type(None)), place)
    elif dataclasses.is_dataclass(hint):
        for name, part in get_type_hints(hint).items():
            check_types(getattr(value, name), part, name)
        time = getattr(value, "time", None)
        if time is not None and time.median <= 0:
            raise ValueError(f"time is {time.median} and not above 0")
    elif origin is dict:
        for key, entry in value.items():
            check_types(key, inner[0], place)
            check_types(entry, inner[1], f"{place} {key}")
    elif origin in (list, tuple):
        of = inner if origin is tuple and inner[-1] is not ... else (inner[0],) * len(value)
        for entry, part in zip(value, of, strict=True):
            check_types(entry, part, place)
    elif hint is float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ValueError(f"{place} is {value!r} and not a finite number")
    elif not isinstance(value, hint):
        raise ValueError(f"{place} is {value!r} and not {hint.__name__}")


@dataclass
class Results:
    """Everything found."""

    sources: list[Source] = field(default_factory=list)
    requests: list[Row] = field(default_factory=list)
    decodes: list[DecodeResult] = field(default_factory=list)
    transformers: list[TransformerRow] = field(default_factory=list)
    kernels: list[KernelRow] = field(default_factory=list)
    fused: list[FusedResult] = field(default_factory=list)
    skipped: list[tuple[str, str]] = field(default_factory=list)
