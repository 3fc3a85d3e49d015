"""Names and refusals of --attention_backend on a CPU, and the kernels behind the names."""

import subprocess
import sys

import pytest
import torch

from layers.attention_backends import (
    SPARSE_BACKENDS,
    TORCH_BACKENDS,
    XFUSER_BACKENDS,
    available_backends,
    default_backend,
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
