"""What runs on the ranks of test_decoder_attention_ranks: selection where ranks have different packages installed."""

import logging
import os
import sys
from types import ModuleType
from typing import Any

import torch

from layers.neighborhood_attention import neighborhood_attention_sdpa
from layers.neighborhood_attention.backend import Target
from layers.neighborhood_attention.fastest import Grid, choose_fastest
from layers.neighborhood_attention.select import report_calls, select_attention
from runner.distributed import start

KERNEL = (3, 3, 3)


class Lines(logging.Handler):
    """What this rank's log says."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


def install_natten(*, wrong: bool = False) -> None:
    module = ModuleType("natten")
    module.__version__ = "0.21.7"

    def na3d(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, kernel_size: Any, scale: float) -> torch.Tensor:
        return neighborhood_attention_sdpa(q, k.roll(int(wrong), 1), v, kernel_size)

    module.na3d = na3d
    sys.modules["natten"] = module


def choose_where_ranks_differ(requested: str, case: str, degrees: dict[str, int]) -> list[dict[str, Any]]:
    """`case`: what the last rank has ("nothing", "wrong", "the same"); all others have a NATTEN that works.

    Every rank's lines, choice and error, in rank order.
    """
    lines = Lines()
    logger = logging.getLogger("layers.neighborhood_attention")
    logger.addHandler(lines)
    logger.setLevel(logging.INFO)
    with start(**degrees) as session:
        rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        for name in ("natten", "kernels", "aiter"):
            sys.modules.pop(name, None)
        last = rank == world - 1
        if not last or case != "nothing":
            install_natten(wrong=last and case == "wrong")
        else:
            sys.modules["kernels"] = None  # type: ignore[assignment]  # the import raises ModuleNotFoundError
        everywhere = session.state.all_gather_object
        target = Target(torch.device("cpu"), "sm90", torch.float32, head_dim=16, kernel_sizes=(KERNEL,))
        found: dict[str, Any] = {"rank": everywhere(rank)[rank], "error": None}
        try:
            selection = select_attention(requested, target, everywhere=everywhere)
        except ValueError as error:
            found["error"] = str(error)
        else:
            choose_fastest(selection, [Grid(KERNEL, (4, 4, 4), 1, 1)], everywhere=everywhere)
            q = torch.randn(1, 4, 4, 4, 1, 16)
            for _ in range(rank + 1):
                selection.attention(q, q, q, (1, 3, 3))
            report_calls(selection, everywhere=everywhere)
            found["chosen"] = selection.describe()
        found["lines"] = lines.said
        return everywhere(found)
