"""Which attention the decoder uses: NATTEN, then AITER's flash-NA3D, then our Triton kernel, then tiled SDPA.

The order is the users'. A backend is accepted after it agreed with the reference on tiny grids on this very device, and
on every rank's. One line of the log for each that is refused and one for the choice.
"""

import functools
import logging
import math
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

import torch

from layers.neighborhood_attention.aiter import make_aiter
from layers.neighborhood_attention.backend import Backend, Size, Target, Unserved, kernel_errors, own_words
from layers.neighborhood_attention.builtin import make_sdpa, make_triton
from layers.neighborhood_attention.natten import make_natten
from layers.neighborhood_attention.reference import neighborhood_attention_reference
from layers.neighborhood_attention.routing import RoutedAttention

logger = logging.getLogger(__name__)

MAKERS: dict[str, Callable[[Target], Backend]] = {
    "natten": make_natten,
    "aiter": make_aiter,
    "triton": make_triton,
    "sdpa": make_sdpa,
}
"""In the order of choice; the last is usable everywhere."""
CHOICES = ("auto", "fastest", *MAKERS)

Everywhere = Callable[[Any], list[Any]]
"""A value of this rank -> the values of all ranks, in order; every rank calls it."""

# Relative L2 on normal inputs. Rounding gives 3e-3 in bf16, 4e-4 in fp16, 5e-4 for fp32 through TF32; a window off by
# one gives 0.1 or more.
_TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 1e-2, torch.float32: 2e-3}

_KNOWN_FASTER = {("natten", "sm90"): ("triton", "3 to 7 times faster than natten on an H200 (docs/backends.md)")}


@dataclass(frozen=True)
class Selection:
    """What was asked for, what it gave, and why the others were refused, by name."""

    requested: str
    attention: RoutedAttention
    refused: dict[str, str]
    target: Target
    timings: dict[str, dict[str, float]] = field(default_factory=dict)
    """What "fastest" measured: milliseconds by kernel size and backend."""

    def describe(self) -> dict[str, Any]:
        """JSON types: `used` by kernel size where that was measured, else one name."""
        names = {str(kernel): self.attention.backend_for(kernel).name for kernel in self.target.kernel_sizes}
        return {
            "requested": self.requested,
            "used": next(iter(names.values())) if len(set(names.values())) == 1 else names,
            "detail": _detail(self.attention.backends[0], self.target),
            "refused": dict(self.refused),
            "measured_milliseconds": dict(self.timings),
            "calls": self.attention.calls,
            "routed_calls": dict(self.attention.routed),
        }


def select_attention(
    requested: str,
    target: Target,
    *,
    disabled: Collection[str] = (),
    everywhere: Everywhere = lambda value: [value],
) -> Selection:
    """The attention for this target: `requested` is one of CHOICES, `disabled` names backends not to use.

    "auto" takes the first that is usable on all ranks, "fastest" keeps all that are, for fastest.py to measure.
    Every rank calls it, with the same arguments but the target.
    Raises ValueError, on every rank, for an unknown name or a named backend that one of the ranks cannot use.
    """
    for name in (*disabled, *([requested] if requested not in ("auto", "fastest") else ())):
        if name not in MAKERS:
            raise ValueError(f"{name} is not an attention of the decoder; there are {', '.join(MAKERS)}")
    names = list(MAKERS) if requested in ("auto", "fastest") else [requested]
    test = SelfTest(target)
    usable: list[Backend] = []
    refused: dict[str, str] = {}
    for name in names:
        backend, reason = _probe(name, target, test, disabled)
        reason = _first_reason(everywhere(reason))
        if backend is not None and reason is None:
            usable.append(backend)
            if requested != "fastest":
                break
        else:
            assert reason is not None
            refused[name] = reason
            if requested == name:
                raise ValueError(
                    f"--decoder_attention {name} cannot be used here: {reason}. Leave it out, or give auto, to take "
                    "the best that can."
                )
            logger.info("decoder attention: %s refused: %s", name, reason)
    _say_choice(requested, usable, target)
    return Selection(requested, RoutedAttention(usable), refused, target)


def report_calls(selection: Selection, *, everywhere: Everywhere = lambda value: [value]) -> None:
    """Add up the calls of all ranks and log, once, those that went to tiled SDPA instead. Every rank calls it."""
    attention = selection.attention
    ranks = everywhere((attention.calls, attention.routed))
    attention.calls = sum(calls for calls, _ in ranks)
    attention.routed = sum((routed for _, routed in ranks), Counter())
    if attention.routed:
        reasons = "; ".join(f"{reason} ({count})" for reason, count in attention.routed.most_common())
        logger.info(
            "decoder attention: %d of %d calls went to sdpa instead: %s",
            attention.routed.total(),
            attention.calls,
            reasons,
        )


def _probe(name: str, target: Target, test: "SelfTest", disabled: Collection[str]) -> tuple[Backend | None, str | None]:
    """The backend, or one sentence that says why not."""
    if name in disabled and name != "sdpa":
        return None, "disabled by the user"
    if name == "sdpa":
        return make_sdpa(target), None
    try:
        backend = MAKERS[name](target)
    except (ImportError, RuntimeError, ValueError) as error:
        return None, str(error)
    reason = test.run(backend)
    return (backend, None) if reason is None else (None, reason)


def _first_reason(reasons: list[str | None]) -> str | None:
    """The reason of the first rank that has one, and which rank it is unless all say the same."""
    if all(reason == reasons[0] for reason in reasons):
        return reasons[0]
    rank, reason = next((rank, reason) for rank, reason in enumerate(reasons) if reason is not None)
    return f"on rank {rank}: {reason}"


def _detail(backend: Backend, target: Target) -> str:
    return f"{target.arch}, {backend.detail}" if backend.detail else target.arch


def _say_choice(requested: str, usable: list[Backend], target: Target) -> None:
    first = usable[0]
    if requested == "fastest" and len(usable) > 1:
        names = ", ".join(backend.name for backend in usable)
        logger.info(
            "decoder attention: using the fastest of %s (%s), measured before the first video", names, target.arch
        )
        return
    logger.info("decoder attention: using %s (%s)", first.name, _detail(first, target))
    faster = _KNOWN_FASTER.get((first.name, target.arch))
    if faster and requested == "auto":
        logger.info("decoder attention: %s is %s: --decoder_attention %s, or fastest", faster[0], faster[1], faster[0])


class SelfTest:
    """A tiny grid for each kernel size of the target, and what the reference makes of it."""

    def __init__(self, target: Target) -> None:
        self.target = target

    def run(self, backend: Backend) -> str | None:
        """Why the backend must not be used, if so: it raises, or its values are wrong."""
        errors: tuple[type[Exception], ...] = (Unserved, *kernel_errors())
        for kernel, (q, k, v), wanted in self._problems:
            try:
                error = _relative(backend.attend(q, k, v, kernel), wanted)
            except errors as failure:
                return f"its self-test at kernel {kernel} failed: {own_words(failure)}"
            tolerance = _TOLERANCE.get(self.target.dtype, 2e-2)
            if not error <= tolerance:  # a NaN is not either
                return f"its self-test at kernel {kernel} is wrong: relative error {error:.2g}, allowed {tolerance:.0e}"
        return None

    @functools.cached_property
    def _problems(self) -> list[tuple[Size, tuple[torch.Tensor, ...], torch.Tensor]]:
        return [self._problem(kernel) for kernel in self.target.kernel_sizes]

    def _problem(self, kernel: Size) -> tuple[Size, tuple[torch.Tensor, ...], torch.Tensor]:
        """Views of one projection, as in the decoder; wide enough for AITER."""
        target = self.target
        wide = 17 if kernel[2] <= 17 else 33
        grid = (kernel[0] + 1, kernel[1] + 1, max(wide, kernel[2] + 1))
        generator = torch.Generator().manual_seed(math.prod(kernel))
        qkv = torch.randn(1, *grid, 3, 2, target.head_dim, generator=generator)
        qkv[..., 0, :, :] *= target.head_dim**-0.5
        q, k, v = qkv.to(target.device, target.dtype).unbind(4)
        return kernel, (q, k, v), neighborhood_attention_reference(q.float(), k.float(), v.float(), kernel)


def _relative(got: torch.Tensor, wanted: torch.Tensor) -> float:
    if got.shape != wanted.shape:
        return math.inf
    return float((got.float() - wanted).norm() / wanted.norm())
