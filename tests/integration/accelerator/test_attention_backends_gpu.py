"""The torch kernels behind --attention_backend on a GPU; the probe inside compares with fp32, log-sum-exp included."""

import pytest
import torch

from layers.attention_backends import available_backends, default_backend, probe_backend, select_backend


@pytest.mark.accelerator
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("name", ["SDPA", "SDPA_FLASH", "SDPA_EFFICIENT"])
def test_torch_kernels_give_output_and_lse(name: str, head_dim: int) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    backend = select_backend(name, device=device, dtype=torch.bfloat16, head_dim=head_dim, needs_lse=True)
    assert backend.attend_lse is not None


@pytest.mark.accelerator
@pytest.mark.nvidia
def test_cudnn_gives_output_and_lse() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    status = probe_backend("CUDNN", device=device, dtype=torch.bfloat16, head_dim=128)
    assert status.available, status.reason
    assert status.returns_lse


@pytest.mark.accelerator
def test_fp32_default_and_the_list() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    assert default_backend(device, torch.float32).attend_lse is not None
    found = {status.name: status for status in available_backends(device, dtype=torch.bfloat16)}
    assert found["SDPA"].available
    assert all(status.reason for status in found.values() if not status.available)
