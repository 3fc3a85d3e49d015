"""Names and refusals of --attention_backend on a CPU, and the kernels behind the names."""

import enum
import subprocess
import sys
from types import ModuleType

import pytest
import torch

from layers.attention_backends import (
    SPARSE_BACKENDS,
    TORCH_BACKENDS,
    XFUSER_BACKENDS,
    available_backends,
    default_backend,
    probe_backend,
    select_backend,
)

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("name", "needs_lse", "says"),
    [
        ("AITER", False, "AITER is not available here: it needs a GPU"),
        ("AITER", False, "This machine has SDPA, SDPA_MATH, SDPA_FLASH."),
        ("FLASH_3", True, "This machine has SDPA, SDPA_FLASH."),
        ("CUDNN", False, "CUDNN is not available here"),
        ("AITR", False, "did you mean AITER?"),
        ("zzz", False, "known are SDPA,"),
        ("AITER_SPARGE", False, "leaves out keys"),
        ("SDPA_MATH", True, "SDPA_MATH does not give the log-sum-exp that --ring_degree above 1 needs"),
    ],
)
def test_refusals(name: str, needs_lse: bool, says: str) -> None:
    with pytest.raises(ValueError, match="--attention_backend") as refused:
        select_backend(name, device=CPU, dtype=torch.float32, head_dim=16, needs_lse=needs_lse)
    assert says in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("head_dim", [8, 16, 128])
@pytest.mark.parametrize("name", [None, "SDPA", "sdpa_flash", "SDPA_MATH"])
def test_torch_kernels_on_a_cpu(name: str | None, head_dim: int, dtype: torch.dtype) -> None:
    backend = select_backend(name, device=CPU, dtype=dtype, head_dim=head_dim)
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, heads, length, head_dim).transpose(1, 2) for heads, length in ((3, 7), (3, 11), (3, 11)))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * head_dim**-0.5
    wanted = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v)
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    q, k, v = (x.to(dtype) for x in (q, k, v))
    assert (backend.attend(q, k, v).float() - wanted).abs().max() < tolerance
    if backend.attend_lse is not None:
        out, lse = backend.attend_lse(q, k, v)
        assert (out.float() - wanted).abs().max() < tolerance
        assert (lse - scores.logsumexp(-1)).abs().max() < tolerance


def test_list_says_what_is_here_and_why_the_others_are_not() -> None:
    found = {status.name: status for status in available_backends(CPU, dtype=torch.float32)}
    assert set(found) == set(TORCH_BACKENDS + XFUSER_BACKENDS)
    assert [s.name for s in found.values() if s.available] == ["SDPA", "SDPA_MATH", "SDPA_FLASH"]
    assert [s.name for s in found.values() if s.returns_lse] == ["SDPA", "SDPA_FLASH"]
    assert all(status.reason for status in found.values() if not status.available)


def test_names_are_disjoint() -> None:
    names = TORCH_BACKENDS + XFUSER_BACKENDS + SPARSE_BACKENDS
    assert len(names) == len(set(names))


def test_default_gives_the_log_sum_exp() -> None:
    assert default_backend(CPU, torch.float32).attend_lse is not None


def test_xfuser_is_not_imported_on_a_cpu() -> None:
    code = (
        "import sys, torch; from layers.attention_backends import available_backends as a;"
        "a(torch.device('cpu'), dtype=torch.float32); print(any(m.startswith('xfuser') for m in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def _fake_xfuser(monkeypatch: pytest.MonkeyPatch, *, with_lse: bool, wrong: bool = False) -> None:
    """A module that looks as xfuser's does: heads first, (q, k, v, dropout_p, is_causal) -> (o, lse or None)."""
    module = ModuleType("xfuser.core.distributed.attention_backend")
    module.AttentionBackendType = enum.Enum("AttentionBackendType", {"AITER": "AITER"})  # type: ignore[attr-defined]

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dropout_p: float, is_causal: bool) -> tuple:
        assert q.shape[1] == 2, "heads first"
        assert (dropout_p, is_causal) == (0.0, False)
        scores = q @ k.transpose(2, 3) * (1.0 if wrong else q.shape[-1] ** -0.5)
        return scores.softmax(-1) @ v, scores.logsumexp(-1) if with_lse else None

    module.ATTENTION_FUNCTION_REGISTRY = {module.AttentionBackendType["AITER"]: attend}  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)


class _Gpu:
    """Answers as a GPU's torch.device would where the module asks; tensors stay on the CPU."""

    type = "cuda"


@pytest.mark.parametrize("with_lse", [True, False])
def test_xfuser_function_is_adapted(monkeypatch: pytest.MonkeyPatch, with_lse: bool) -> None:
    _fake_xfuser(monkeypatch, with_lse=with_lse)
    _pretend_gpu(monkeypatch)
    status = probe_backend("AITER", device=_Gpu(), dtype=torch.float32, head_dim=16)  # type: ignore[arg-type]
    assert (status.available, status.returns_lse) == (True, with_lse)


def test_wrong_or_missing_xfuser_function_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    _fake_xfuser(monkeypatch, with_lse=True, wrong=True)
    _pretend_gpu(monkeypatch)
    status = probe_backend("AITER", device=_Gpu(), dtype=torch.float32, head_dim=16)  # type: ignore[arg-type]
    assert not status.available
    assert "wrong on this device" in status.reason
    monkeypatch.setitem(sys.modules, "xfuser.core.distributed.attention_backend", None)
    status = probe_backend("AITER", device=_Gpu(), dtype=torch.float32, head_dim=16)  # type: ignore[arg-type]
    assert "xfuser" in status.reason


def _pretend_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    to = torch.Tensor.to

    def stay(x: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        return to(x, *[a for a in args if not isinstance(a, _Gpu)], **kwargs)  # type: ignore[call-overload]

    monkeypatch.setattr(torch.Tensor, "to", stay)
