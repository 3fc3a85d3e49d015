"""What is installed, for the tests of how an attention is chosen."""

import pytest
from stand_ins import absent


@pytest.fixture
def nothing_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    absent(monkeypatch, "natten", "aiter", "kernels")
    monkeypatch.delenv("DIFFUSERS_DISABLE_REMOTE_CODE", raising=False)


@pytest.fixture
def triton_works(monkeypatch: pytest.MonkeyPatch) -> None:
    """Our kernel as it is chosen; its values come from SDPA, for there is no GPU here."""
    from layers.neighborhood_attention import builtin

    monkeypatch.setattr(builtin, "na3d_flash_attn", builtin.neighborhood_attention_sdpa)
