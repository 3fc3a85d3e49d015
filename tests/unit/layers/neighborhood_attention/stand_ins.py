"""Packages that are not installed here, as modules in sys.modules that keep the contracts of the real ones."""

import importlib.abc
import importlib.machinery
import logging
import sys
from types import ModuleType

import pytest
import torch

from layers.neighborhood_attention import neighborhood_attention_sdpa
from layers.neighborhood_attention.backend import Target
from layers.neighborhood_attention.select import select_attention

AITER_FUNCTION = "aiter.ops.triton.attention.na3d_flash"


class _Failing(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """An installed package whose import raises."""

    def __init__(self, name: str, error: Exception) -> None:
        self.name, self.error = name, error

    def find_spec(self, fullname, path, target=None):
        return importlib.machinery.ModuleSpec(fullname, self) if fullname == self.name else None

    def exec_module(self, module):
        raise self.error


def absent(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Not installed, whatever this machine has."""
    for name in names:
        for known in [n for n in sys.modules if n == name or n.startswith(f"{name}.")]:
            monkeypatch.delitem(sys.modules, known)
        error = ModuleNotFoundError(f"No module named {name!r}", name=name)
        monkeypatch.setattr(sys, "meta_path", [_Failing(name, error), *sys.meta_path])


def failing(monkeypatch: pytest.MonkeyPatch, name: str, error: Exception) -> None:
    """Installed; its import raises."""
    monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(sys, "meta_path", [_Failing(name, error), *sys.meta_path])


def package(monkeypatch: pytest.MonkeyPatch, name: str, **content: object) -> ModuleType:
    """A module of this content; the packages around it are made too."""
    parts = name.split(".")
    for i in range(1, len(parts) + 1):
        path = ".".join(parts[:i])
        if path not in sys.modules or i == len(parts):
            module = ModuleType(path)
            module.__path__ = []
            monkeypatch.setitem(sys.modules, path, module)
    module = sys.modules[name]
    for key, value in content.items():
        setattr(module, key, value)
    return module


def na3d(query, key, value, kernel_size, *, scale=None, backend=None, calls=None):
    """NATTEN's contract: one grid, contiguous tensors (wrong values otherwise), its own scale unless given."""
    assert query.shape == key.shape == value.shape
    assert all(n >= k for n, k in zip(key.shape[1:4], kernel_size, strict=True))
    assert min(kernel_size) > 1
    if not (query.is_contiguous() and key.is_contiguous() and value.is_contiguous()):
        return torch.zeros_like(query)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    return neighborhood_attention_sdpa(query * scale, key, value, kernel_size)


def na3d_flash_attn(q, k, v, kernel_size):
    """AITER's contract (ROCm/aiter#5230): one grid, bf16, its limits; q is pre-scaled."""
    assert q.shape == k.shape == v.shape
    assert q.dtype == torch.bfloat16
    width, head_dim = q.shape[3], q.shape[5]
    assert width >= 16
    assert kernel_size[2] <= (33 if width >= 32 else 17)
    assert head_dim >= 16
    assert head_dim & (head_dim - 1) == 0
    return neighborhood_attention_sdpa(q, k, v, kernel_size)


def with_natten(monkeypatch: pytest.MonkeyPatch, function=na3d, version: str = "0.21.7") -> None:
    package(monkeypatch, "natten", __version__=version, na3d=function)


def with_aiter(monkeypatch: pytest.MonkeyPatch, function=na3d_flash_attn, version: str = "0.1.7") -> None:
    package(monkeypatch, "aiter", __version__=version)
    if function is not None:
        package(monkeypatch, AITER_FUNCTION, na3d_flash_attn=function)


def target(arch: str = "sm90", dtype: torch.dtype = torch.bfloat16, kernels=((3, 5, 5),)) -> Target:
    """A device that says it is `arch`; its tensors are on the CPU."""
    return Target(torch.device("cpu"), arch, dtype, head_dim=16, kernel_sizes=kernels)


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name.startswith("layers.")]


def choose(caplog: pytest.LogCaptureFixture, requested: str = "auto", *arguments, **options):
    caplog.set_level(logging.INFO, "layers")
    return select_attention(requested, target(*arguments), **options)


def refusal(caplog: pytest.LogCaptureFixture, name: str, *arguments, **options) -> str:
    """The reason in the log of auto; the named choice must fail with the same one."""
    selection = choose(caplog, "auto", *arguments, **options)
    reason = selection.refused[name]
    assert f"decoder attention: {name} refused: {reason}" in lines(caplog)
    with pytest.raises(ValueError, match="cannot be used here") as error:
        select_attention(name, target(*arguments), **options)
    assert str(error.value) == (
        f"--decoder_attention {name} cannot be used here: {reason}. Leave it out, or give auto, to take the best that "
        "can."
    )
    return reason
