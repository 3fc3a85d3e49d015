"""What runs on the ranks of test_pipeline_parallel: whole requests on the tiny model, in one process and on all."""

import os
from datetime import timedelta
from typing import Any

import torch
from PIL import Image
from transformer_cases import deviation

from runner.distributed import build_state, start
from runner_models import load_model
from runner_models.ltx2.transformer import parallelize


def check_requests(model_name: str, degrees: list[tuple[int, int]], changes: dict[str, Any]) -> dict[str, Any]:
    """Final video and audio latents of t2v and i2v, parallel against one process, for every (ulysses, ring)."""
    timeout = timedelta(seconds=120)
    found: dict[str, Any] = {}
    with start(ulysses_degree=int(os.environ["WORLD_SIZE"]), timeout=timeout) as session:
        if session.state.rank == 0:
            load_model(model_name)  # made once
        session.barrier("checkpoint")
        model = load_model(model_name)
        model._decode_video = lambda latents, *_: latents
        model._decode_audio = lambda latents: latents
        image = Image.effect_noise((changes["width"], changes["height"]), 80).convert("RGB")
        requests = {"t2v": model.request("a cat dancing", **changes)}
        requests["i2v"] = model.request("a cat dancing", image=image, **changes)
        wanted = {task: model.generate(request) for task, request in requests.items()}
        for ulysses, ring in degrees:
            state = build_state(
                session.state.rank,
                device=torch.device("cpu"),
                timeout=timeout,
                ulysses_degree=ulysses,
                ring_degree=ring,
                data_parallel_degree=1,
            )
            handle = parallelize(model.text_to_video.transformer, state)
            for task, request in requests.items():
                got = model.generate(request)
                found[f"u{ulysses}r{ring} {task}"] = {
                    "video": deviation(got.frames, wanted[task].frames),
                    "audio": deviation(got.audio, wanted[task].audio),
                }
            handle.remove()
    return found
