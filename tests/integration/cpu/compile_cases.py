"""What runs on the ranks of test_compile_parallel: compiled blocks against eager ones, step after step."""

import os
from datetime import timedelta
from typing import Any

import torch
from torch._dynamo.utils import counters
from transformer_cases import Case, deviation, forward, make_transformer

from runner.distributed import start
from runner_models.ltx2.compilation import compile_blocks, compile_seconds, graph_count
from runner_models.ltx2.transformer import parallelize

STAGES = (Case("stage 1", video=(3, 4, 5), i2v=True), Case("stage 2", video=(3, 8, 10), i2v=True))
GUIDED = (
    Case("cfg", batch=2),
    Case("stg", extra={"spatio_temporal_guidance_blocks": [1]}),
    Case("modality", extra={"isolate_modalities": True}),
)


def check_compiled(ulysses: int, ring: int, backend: str, cases: tuple[Case, ...]) -> dict[str, Any]:
    """Three steps of every case, then the first case again."""
    assert int(os.environ["WORLD_SIZE"]) == ulysses * ring
    with start(ulysses_degree=ulysses, ring_degree=ring, timeout=timedelta(seconds=500)) as session:
        model = make_transformer("split")
        parallelize(model, session.state)
        eager = {(case.name, step): forward(model, case, step) for case in cases for step in range(3)}
        torch._dynamo.reset()
        counters.clear()
        compile_blocks(model, backend=backend)
        worst, graphs, graphs_later = 0.0, {}, {}
        for case in (*cases, cases[0]):
            for step in range(3):
                got, wanted = forward(model, case, step), eager[case.name, step]
                worst = max(worst, deviation(got[0], wanted[0]), deviation(got[1], wanted[1]))
                (graphs if step == 0 else graphs_later)[case.name] = graph_count()
        return {
            "worst": worst,
            "graphs": graphs,
            "graphs_later": graphs_later,
            "breaks": dict(counters["graph_break"]),
            "seconds": compile_seconds(),
        }
