"""What every backend of the decoder's attention gives: one function, and what it cannot take.

Layouts: geometry.py.
"""

import contextlib
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType
from typing import Protocol

import torch

Size = tuple[int, int, int]
Attend = Callable[..., torch.Tensor]

OLDEST = 80
"""The first NVIDIA architecture with bf16 on tensor cores."""
AMD = ("gfx942", "gfx950")
"""Those that our Triton kernels are compiled for and checked."""

IMPORT_ERRORS = (ImportError, OSError, RuntimeError, AttributeError, AssertionError, KeyError, TypeError, ValueError)
"""What a package that is installed but broken raises as it is imported: an undefined symbol is an ImportError or an
OSError, a torch it was not built for an AttributeError, a driver it cannot find a RuntimeError."""


class NeighborhoodAttention(Protocol):
    """The attention a decoder block calls; arguments and result are those of neighborhood_attention_reference.

    `softmax_bound`, a promise that no |q . k| is larger, is given only where an attribute `takes_bound` is true.
    """

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        kernel_size: Sequence[int],
        *,
        q_start: Sequence[int] = (0, 0, 0),
        kv_start: Sequence[int] = (0, 0, 0),
        grid: Sequence[int] | None = None,
        softmax_bound: float | None = None,
    ) -> torch.Tensor: ...


@dataclass(frozen=True)
class Target:
    """What the attention is for: the device and its architecture ("cpu", "sm90", "gfx942"), the dtype of the run,
    and the head_dim and kernel sizes of the decoder."""

    device: torch.device
    arch: str
    dtype: torch.dtype
    head_dim: int
    kernel_sizes: tuple[Size, ...]

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    @property
    def place(self) -> str:
        """The architecture in a sentence."""
        return "a CPU" if self.arch == "cpu" else self.arch

    @property
    def compute_capability(self) -> int | None:
        """90 for sm90; None where this is not an NVIDIA GPU."""
        return compute_capability(self.arch)


@dataclass(frozen=True)
class Backend:
    """A kernel that is there. `detail` says which one, for the log.

    `attend` is called with q, k, v and kernel_size, and with q_start, kv_start and grid where `takes_offsets`; without,
    q, k and v cover one grid. With `takes_bound` also with softmax_bound, which may be None. It raises Unserved for a
    call that the kernel cannot take.
    """

    name: str
    attend: Attend
    takes_offsets: bool
    detail: str = ""
    takes_bound: bool = False


class Unserved(Exception):
    """This kernel cannot take this call; the text is the reason."""


def architecture(device: torch.device) -> str:
    """The device's architecture as it is called in the log: "cpu", "sm90", "gfx942"."""
    if device.type != "cuda":
        return device.type
    if torch.version.hip is not None:
        return torch.cuda.get_device_properties(device).gcnArchName.split(":")[0]
    return "sm{}{}".format(*torch.cuda.get_device_capability(device))


def compute_capability(arch: str) -> int | None:
    """90 for sm90; None where this is not an NVIDIA GPU."""
    number = arch.removeprefix("sm")
    return int(number) if number != arch and number.isdigit() else None


def runs_our_triton(arch: str) -> bool:
    """Whether our Triton kernels are for this architecture: NVIDIA from OLDEST on, and the chips of AMD."""
    capability = compute_capability(arch)
    return arch in AMD or (capability is not None and capability >= OLDEST)


def on_device(x: torch.Tensor) -> contextlib.AbstractContextManager[object]:
    """Triton launches on the current device, which need not be the tensor's."""
    return torch.cuda.device(x.device) if x.is_cuda else contextlib.nullcontext()


@functools.cache
def kernel_errors() -> tuple[type[Exception], ...]:
    """What a kernel raises where it cannot be built or launched. Memory faults are RuntimeErrors of torch."""
    errors = (RuntimeError, ValueError, TypeError, AssertionError, AttributeError, KeyError, ImportError, OSError)
    try:
        from triton.errors import TritonError
    except ImportError:
        return errors
    return (*errors, TritonError)


def package_version(module: ModuleType, *distributions: str) -> str:
    """The version a package says it has, or that of the first of these distributions that is installed."""
    own = getattr(module, "__version__", None)
    if own:
        return str(own)
    for name in distributions:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return "of unknown version"


def own_words(error: BaseException) -> str:
    """The exception's type and the first line it says."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
