"""Kernels that do not agree with plain torch on a device are not used there; the log says why, once."""

import pytest
import selftest_calls
import torch

from layers.fused import launch, selftest


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_they_agree(interpreted, dtype):
    lines, runs = interpreted(selftest_calls.verdict, None, dtype)
    assert lines == ["fused kernels: in use, agree with plain torch on this cpu"]
    assert runs


@pytest.mark.parametrize(
    ("fault", "line"),
    [
        ("disabled", "turned off by LTX_RUNNER_DISABLE_FUSED"),
        ("wrong", "norm, gated MLP, residual is off by "),
        ("nan", "the gated product is off by nan"),
        ("broken", "norm to Q, K, V cannot be run: RuntimeError: no such"),
    ],
)
def test_a_refusal(interpreted, fault, line):
    lines, runs = interpreted(selftest_calls.verdict, fault)
    assert len(lines) == 1
    assert lines[0].startswith(f"fused kernels: {line}")
    assert lines[0].endswith("; plain torch instead")
    assert not runs


def test_nothing_where_no_kernel_runs(caplog):
    with caplog.at_level("INFO"):
        selftest.verify(torch.device("cpu"), torch.float32)
    assert not [line for line in caplog.messages if "in use" in line]
    assert not launch._REFUSED
