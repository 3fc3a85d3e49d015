"""torch.compile for the transformer's repeated blocks, and what it cost."""

import torch
from diffusers.models.transformers.transformer_ltx2 import LTX2VideoTransformer3DModel
from torch._dynamo.utils import compilation_time_metrics


def compile_blocks(transformer: LTX2VideoTransformer3DModel, *, backend: str = "inductor") -> None:
    """Compile each kind of call of a block once; the blocks share the graphs. Apply parallelize() before.

    Static shapes: a request has one shape a stage, so stage 1 and stage 2 cost one compilation each and every later
    step and request of these sizes none (docs/parallel.md); kernels specialised to a shape are also the faster ones.
    torch keeps the compiled kernels on disk for the next process.
    """
    transformer.compile_repeated_blocks(dynamic=False, backend=backend)


def compile_seconds() -> float:
    """Seconds this process has spent compiling so far; the difference over a call says whether it compiled."""
    return float(sum(compilation_time_metrics.get("_compile.compile_inner", [])))


def graph_count() -> int:
    """Graphs compiled by this process so far."""
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])
