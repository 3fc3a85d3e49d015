"""What test_fused_selftest.py runs where Triton interprets kernels."""

import logging
from unittest import mock

import torch

from layers.fused import launch, narrow, selftest, tokens

CPU = torch.device("cpu")


class _Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def verdict(fault: str | None, dtype: torch.dtype = torch.float32) -> tuple[list[str], bool]:
    """The lines in the log, and whether kernels run afterwards."""
    assert launch.kernels() is not None  # imports Triton, without which a CPU has no kernels
    handler, logger = _Lines(), logging.getLogger("layers.fused")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    patches = {
        None: mock.patch.dict("os.environ"),
        "disabled": mock.patch.dict("os.environ", {selftest.DISABLE: "1"}),
        "wrong": mock.patch.object(narrow, "gated_mlp_", lambda x, *_, **__: x),
        "nan": mock.patch.object(tokens, "silu_mul_", lambda gate, up: gate * torch.nan),
        "broken": mock.patch.object(
            narrow, "project_heads", mock.Mock(side_effect=RuntimeError("no such\ninstruction"))
        ),
    }
    try:
        selftest.verify.cache_clear()
        with patches[fault]:
            selftest.verify(CPU, dtype)
            selftest.verify(CPU, dtype)
        return handler.lines, launch.runs_kernels(torch.empty(1, dtype=dtype))
    finally:
        launch._REFUSED.clear()
        selftest.verify.cache_clear()
        logger.removeHandler(handler)
        logger.setLevel(level)
