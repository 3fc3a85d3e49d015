"""The names of --attention_backend, and the kernels behind them.

Names are xfuser's (AttentionBackendType, 0.7.0). The SDPA names and CUDNN go to torch's own operators on every device;
the others to xfuser's registered functions, on an accelerator only: xfuser refuses to be imported without one.
A backend is used after it agreed with an fp32 reference on a tiny problem on this very device; that also finds out
whether its package is there and whether it gives the log-sum-exp that ring attention and the audio merge need.

Layouts: q, k, v, o are (B, S, H, D), tokens before heads; lse is (B, H, S), fp32, natural logarithm.
"""

import difflib
import importlib
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

log = logging.getLogger(__name__)

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
AttendLse = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]

DEFAULT_BACKEND = "SDPA"
TORCH_BACKENDS = ("SDPA", "SDPA_MATH", "SDPA_EFFICIENT", "SDPA_FLASH", "CUDNN")
XFUSER_BACKENDS = (
    *("FLASH", "FLASH_3", "FLASH_3_FP8", "FLASH_4", "FLASH_4_FP4", "NVTE_FP8", "SAGE"),
    *("AITER", "AITER_BF16", "AITER_BF16FP8", "AITER_FP8", "AITER_I8FP8", "AITER_MXFP8", "AITER_F8F6", "AITER_MXFP6"),
    *("AITER_F6F4", "AITER_MXFP4", "AITER_F4F4", "AITER_SAGE", "AITER_SAGE_V2", "AITER_FLYDSL", "AITER_FLYDSL_FP8"),
)
# Rounds Q, K or V below 16 bits; compared loosely, and said so in the log.
_LOW_PRECISION = ("FP8", "FP4", "FP6", "F8F6", "F6F4", "F4F4", "SAGE")
# Drops keys, or needs the model to be trained for it: another function, refused.
SPARSE_BACKENDS = (
    *("FLEX_BLOCK_ATTN", "FLEX_BLOCK_SPARGE", "FLEX_VSA_H3", "TRITON_VSA_H3", "AITER_VSA", "AITER_SPARGE"),
    *("AITER_SPARGE_V2", "AITER_SPARSE_SAGE", "AITER_SPARSE_SAGE_V2", "AITER_I8FP8_SPARGE", "AITER_FP8_SPARGE"),
    *("AITER_MXFP8_SPARGE", "AITER_F8F6_SPARGE", "AITER_MXFP6_SPARGE", "AITER_F6F4_SPARGE", "AITER_MXFP4_SPARGE"),
    "AITER_F4F4_SPARGE",
)
# What a missing package, a missing kernel or a refused shape raises inside a backend.
_BACKEND_ERRORS = (
    ImportError,
    NameError,
    AttributeError,
    RuntimeError,
    TypeError,
    ValueError,
    AssertionError,
    KeyError,
)
# Relative L2 to fp32 on the probe. bf16 rounding gives 3e-3; 8-bit kernels up to 6e-2 on normal inputs.
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 2e-2, torch.float16: 2e-2}
_LOW_PRECISION_TOLERANCE = 0.25


@dataclass(frozen=True)
class AttentionBackend:
    """A kernel for full attention. attend_lse is None where the kernel does not give its log-sum-exp."""

    name: str
    attend: Attend
    attend_lse: AttendLse | None


@dataclass(frozen=True)
class BackendStatus:
    """What a probe found: reason says why the backend is not available here, and is empty where it is."""

    name: str
    available: bool
    returns_lse: bool
    reason: str = ""


def select_backend(
    name: str | None, *, device: torch.device, dtype: torch.dtype, head_dim: int, needs_lse: bool = False
) -> AttentionBackend:
    """The named backend (None: SDPA), proven on this device. needs_lse: ring attention will be used.

    Raises ValueError for an unknown name (with the nearest), one that this machine lacks, or one without log-sum-exp
    where needs_lse; the message lists what this machine has.
    """
    name = (name or DEFAULT_BACKEND).upper()
    if name in SPARSE_BACKENDS:
        raise ValueError(f"--attention_backend {name} leaves out keys, which changes the video; use a dense one.")
    if name not in TORCH_BACKENDS + XFUSER_BACKENDS:
        nearest = difflib.get_close_matches(name, TORCH_BACKENDS + XFUSER_BACKENDS, n=1)
        hint = f"did you mean {nearest[0]}?" if nearest else f"known are {', '.join(TORCH_BACKENDS + XFUSER_BACKENDS)}."
        raise ValueError(f"--attention_backend {name} is unknown; {hint}")
    status = probe_backend(name, device=device, dtype=dtype, head_dim=head_dim)
    if not status.available:
        usable = _usable(device, dtype, head_dim, needs_lse)
        raise ValueError(
            f"--attention_backend {name} is not available here: {status.reason}. This machine has {usable}."
        )
    if needs_lse and not status.returns_lse:
        usable = _usable(device, dtype, head_dim, needs_lse)
        raise ValueError(
            f"--attention_backend {name} does not give the log-sum-exp that --ring_degree above 1 needs; "
            f"use {usable}, or --ring_degree 1."
        )
    backend = _build(name, device, dtype)
    return backend if status.returns_lse else replace(backend, attend_lse=None)


def default_backend(device: torch.device, dtype: torch.dtype) -> AttentionBackend:
    """Torch's own attention for this device and dtype, which always gives the log-sum-exp too; not probed."""
    return _build(DEFAULT_BACKEND, device, dtype)


def few_queries_lse(device: torch.device, dtype: torch.dtype) -> AttendLse:
    """Torch's attention with log-sum-exp for a handful of queries, down to one; not probed.

    Not cuDNN, whatever the device: it plans a kernel per shape, and the audio stream may be a single token.
    """
    if device.type == "cpu":
        return _flash_cpu
    return _efficient if dtype == torch.float32 else _flash


def available_backends(device: torch.device, *, dtype: torch.dtype, head_dim: int = 128) -> list[BackendStatus]:
    """Probe every known dense backend on this device."""
    names = TORCH_BACKENDS + XFUSER_BACKENDS
    return [probe_backend(name, device=device, dtype=dtype, head_dim=head_dim) for name in names]


def probe_backend(name: str, *, device: torch.device, dtype: torch.dtype, head_dim: int) -> BackendStatus:
    """Run the backend on 2 heads, 160 queries, 96 keys and compare it with attention in fp32."""
    if device.type == "cpu" and name not in ("SDPA", "SDPA_MATH", "SDPA_FLASH"):
        return BackendStatus(name, available=False, returns_lse=False, reason="it needs a GPU, and this is a CPU")
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, length, 2, head_dim, generator=generator) for length in (160, 96, 96))
    wanted, wanted_lse = _reference(q, k, v)
    q, k, v = (x.to(device, dtype) for x in (q, k, v))
    try:
        backend = _build(name, device, dtype)
        with torch.no_grad():
            error = _relative(backend.attend(q, k, v), wanted)
    except _BACKEND_ERRORS as err:
        words = str(err).strip().splitlines() or [""]
        return BackendStatus(name, available=False, returns_lse=False, reason=f"{type(err).__name__}: {words[0]}")
    low_precision = any(part in name for part in _LOW_PRECISION)
    tolerance = _LOW_PRECISION_TOLERANCE if low_precision else _TOLERANCE[dtype]
    if not error <= tolerance:
        reason = f"it is wrong on this device: relative error {error:.2g} against fp32"
        return BackendStatus(name, available=False, returns_lse=False, reason=reason)
    if low_precision:
        log.warning("attention backend %s rounds its inputs: relative error %.2g on a probe", name, error)
    returns_lse = _gives_lse(backend, q, k, v, wanted_lse, tolerance)
    return BackendStatus(name, available=True, returns_lse=returns_lse)


def _gives_lse(
    backend: AttentionBackend,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    wanted: torch.Tensor,
    tolerance: float,
) -> bool:
    if backend.attend_lse is None:
        return False
    try:
        with torch.no_grad():
            _, lse = backend.attend_lse(q, k, v)
        return lse.shape == wanted.shape and lse.dtype == torch.float32 and _relative(lse, wanted) <= tolerance
    except _BACKEND_ERRORS as err:
        log.debug("attention backend %s gives no log-sum-exp: %s", backend.name, err)
        return False


def _usable(device: torch.device, dtype: torch.dtype, head_dim: int, needs_lse: bool) -> str:
    found = available_backends(device, dtype=dtype, head_dim=head_dim)
    return ", ".join(s.name for s in found if s.available and (s.returns_lse or not needs_lse))


def _relative(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((got.float().cpu() - wanted).norm() / wanted.norm())


def _reference(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5
    return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v), scores.logsumexp(-1)


def _build(name: str, device: torch.device, dtype: torch.dtype) -> AttentionBackend:
    if name in XFUSER_BACKENDS:
        return _xfuser_backend(name)
    if name == "SDPA":
        return AttentionBackend(name, _sdpa, _default_lse(device, dtype))
    if name == "SDPA_MATH":
        return AttentionBackend(name, _sdpa_math, None)
    with_lse = _flash_cpu if device.type == "cpu" else {"CUDNN": _cudnn, "SDPA_EFFICIENT": _efficient}.get(name, _flash)
    return AttentionBackend(name, _without_lse(with_lse), with_lse)


def _default_lse(device: torch.device, dtype: torch.dtype) -> AttendLse:
    if device.type == "cpu":
        return _flash_cpu
    if dtype == torch.float32:
        return _efficient
    # cuDNN on Hopper and newer: 1.20x flash-2 over a stage-2 forward (2601 against 3137 ms, H200, torch 2.11).
    hopper = torch.version.hip is None and torch.cuda.get_device_capability(device) >= (9, 0)
    return _cudnn if hopper else _flash


def _without_lse(attend_lse: AttendLse) -> Attend:
    return lambda q, k, v: attend_lse(q, k, v)[0]


def _sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)).transpose(1, 2)


def _sdpa_math(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        return _sdpa(q, k, v)


def _heads_first(*tensors: torch.Tensor) -> list[torch.Tensor]:
    return [x.transpose(1, 2) for x in tensors]


def _flash_cpu(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    o, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*_heads_first(q, k, v))
    return o.transpose(1, 2), lse


def _flash(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    o, lse = torch.ops.aten._scaled_dot_product_flash_attention(*_heads_first(q, k, v))[:2]
    return o.transpose(1, 2), lse[:, :, : q.shape[1]]


def _efficient(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    # This kernel pads its log-sum-exp to a multiple of 32 queries.
    o, lse = torch.ops.aten._scaled_dot_product_efficient_attention(*_heads_first(q, k, v), None, True)[:2]
    return o.transpose(1, 2), lse[:, :, : q.shape[1]]


def _cudnn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    o, lse = torch.ops.aten._scaled_dot_product_cudnn_attention(*_heads_first(q, k, v), None, True)[:2]
    return o.transpose(1, 2), lse.reshape(o.shape[:3])


def _xfuser_backend(name: str) -> AttentionBackend:
    """xfuser's registered function: (q, k, v, dropout_p, is_causal), heads first, gives (o, lse or None)."""
    module = importlib.import_module("xfuser.core.distributed.attention_backend")
    function = module.ATTENTION_FUNCTION_REGISTRY[module.AttentionBackendType[name]]

    def attend_lse(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        o, lse = function(*_heads_first(q, k, v), 0.0, False)
        if lse is None:
            raise RuntimeError(f"{name} returned no log-sum-exp")
        return o.transpose(1, 2), lse.float()

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return function(*_heads_first(q, k, v), 0.0, False)[0].transpose(1, 2)

    return AttentionBackend(name, attend, attend_lse)
