"""Names for the profiler: a range around every denoising step. Without a profiler a range costs microseconds."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.profiler import record_function

StepEnd = Callable[[Any, int, Any, dict[str, Any]], dict[str, Any]]


@contextmanager
def step_ranges(transformer: torch.nn.Module, stage: str) -> Iterator[StepEnd]:
    """Name the steps of one denoising stage: "stage1 step 1" from the first call of the transformer to the step's end.

    Gives the `callback_on_step_end` that the diffusers pipeline must be called with.
    """
    opened: record_function | None = None
    steps = 0

    def begin(module: torch.nn.Module, args: Any) -> None:
        nonlocal opened
        if opened is None:  # guidance calls it several times a step
            opened = record_function(f"{stage} step {steps + 1}")
            opened.__enter__()

    def end() -> None:
        nonlocal opened
        if opened is not None:
            opened.__exit__(None, None, None)
            opened = None

    def step_end(pipe: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        nonlocal steps
        steps += 1
        end()
        return tensors

    hook = transformer.register_forward_pre_hook(begin, prepend=True)
    try:
        yield step_end
    finally:
        hook.remove()
        end()
