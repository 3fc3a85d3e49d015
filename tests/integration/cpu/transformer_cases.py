"""What runs on the ranks of test_transformer_parallel: one stock forward against one parallel forward, case by case."""

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from functools import lru_cache
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from diffusers.models.transformers.transformer_ltx2 import LTX2PerturbedAttnProcessor, LTX2VideoTransformer3DModel
from torch.utils._python_dispatch import TorchDispatchMode

from layers.parallel_state import ParallelState
from runner.distributed import build_state, start
from runner_models.ltx2 import transformer as subject
from runner_models.ltx2.payload import step_bytes

HEADS, HEAD_DIM, AUDIO_HEAD_DIM, LAYERS, TEXT_TOKENS = 8, 16, 8, 2, 12


@dataclass(frozen=True)
class Case:
    """One call of the transformer. `video` is (frames, height, width) in latent cells."""

    name: str
    video: tuple[int, int, int] = (3, 4, 5)
    audio_tokens: int = 9
    batch: int = 1
    rope_type: str = "split"
    i2v: bool = False
    keyframes: bool = False
    coords: bool = True
    named_output: bool = False
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        frames, height, width = self.video
        return frames * height * width


CASES = (
    Case("t2v"),
    Case("t2v-interleaved", rope_type="interleaved"),
    Case("t2v-1755", video=(13, 9, 15), audio_tokens=101),
    Case("t2v-cfg", batch=2),
    Case("coords-from-sizes", coords=False, named_output=True),
    Case("i2v", i2v=True),
    Case("i2v-cfg-interleaved", i2v=True, batch=2, rope_type="interleaved"),
    Case("keyframes", keyframes=True, i2v=True),
    Case("cross-timestep", i2v=True, extra={"use_cross_timestep": True}),
    Case("stg-all", extra={"spatio_temporal_guidance_blocks": [1]}),
    Case("stg-mixed", batch=2, extra={"spatio_temporal_guidance_blocks": [1], "perturbation_mask": (0.0, 1.0)}),
    Case("isolated", extra={"isolate_modalities": True}),
    Case("one-video-token", video=(1, 1, 1)),
    Case("two-video-tokens", video=(1, 1, 2), i2v=True, keyframes=True),
    Case("one-audio-token", audio_tokens=1),
)


@lru_cache
def make_transformer(rope_type: str, layers: int = LAYERS) -> LTX2VideoTransformer3DModel:
    """Two small blocks of the production kind, with gains that make a wrong position or a missing key visible."""
    inner, audio_inner = HEADS * HEAD_DIM, HEADS * AUDIO_HEAD_DIM
    torch.manual_seed(0)
    model = LTX2VideoTransformer3DModel(
        in_channels=128,
        out_channels=128,
        num_attention_heads=HEADS,
        attention_head_dim=HEAD_DIM,
        cross_attention_dim=inner,
        gated_attn=True,
        cross_attn_mod=True,
        audio_in_channels=32,
        audio_out_channels=32,
        audio_num_attention_heads=HEADS,
        audio_attention_head_dim=AUDIO_HEAD_DIM,
        audio_cross_attention_dim=audio_inner,
        audio_gated_attn=True,
        audio_cross_attn_mod=True,
        num_layers=layers,
        rope_type=rope_type,
        use_prompt_embeddings=False,
        perturbed_attn=True,
        ff_bias=False,
        use_keyframes_abs_pos_embedding=True,
    ).eval()
    with torch.no_grad():
        model.keyframes_abs_pos_embedding.normal_(0, 0.2)
        for name, parameter in model.named_parameters():
            if name.endswith(("to_q.weight", "to_k.weight", "to_v.weight", "to_out.0.weight")):
                parameter.mul_(2.0)
    return model.requires_grad_(False)


def inputs_of(case: Case, model: LTX2VideoTransformer3DModel, seed: int = 0) -> dict[str, Any]:
    """Keyword arguments as the stock pipelines pass them."""
    generator = torch.Generator().manual_seed(seed)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    frames, height, width = case.video
    batch, tokens = case.batch, case.num_tokens
    sigma = torch.full((batch,), 600.0 + seed)
    timestep = sigma
    if case.i2v:  # the first frame is given
        timestep = sigma[:, None] * (torch.arange(tokens) >= min(height * width, tokens - 1)).float()
    call: dict[str, Any] = {
        "hidden_states": noise(batch, tokens, 128),
        "audio_hidden_states": noise(batch, case.audio_tokens, 32),
        "encoder_hidden_states": noise(batch, TEXT_TOKENS, HEADS * HEAD_DIM),
        "audio_encoder_hidden_states": noise(batch, TEXT_TOKENS, HEADS * AUDIO_HEAD_DIM),
        "timestep": timestep,
        "audio_timestep": sigma,
        "sigma": sigma,
        "encoder_attention_mask": torch.ones(batch, TEXT_TOKENS),
        "audio_encoder_attention_mask": torch.ones(batch, TEXT_TOKENS),
        "num_frames": frames,
        "height": height,
        "width": width,
        "fps": 24.0,
        "audio_num_frames": case.audio_tokens,
        "return_dict": case.named_output,
        **case.extra,
    }
    if case.coords:
        call["video_coords"] = model.rope.prepare_video_coords(batch, frames, height, width, torch.device("cpu"))
    if case.keyframes:
        call["video_keyframes_mask"] = (torch.arange(tokens) % 3 == 0).float().view(1, -1, 1).expand(batch, -1, -1)
    if "perturbation_mask" in call:
        call["perturbation_mask"] = torch.tensor(call["perturbation_mask"])
    return call


def forward(model: LTX2VideoTransformer3DModel, case: Case, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    inputs = inputs_of(case, model, seed)
    inputs = {name: x.to(model.device) if isinstance(x, torch.Tensor) else x for name, x in inputs.items()}
    with torch.inference_mode():
        output = model(**inputs)
    return (output.sample, output.audio_sample) if case.named_output else output


def deviation(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """Largest difference, in standard deviations of what is wanted; infinite for another shape."""
    return float((got - wanted).abs().max() / wanted.std()) if got.shape == wanted.shape else float("inf")


@contextlib.contextmanager
def fault(name: str, state: ParallelState) -> Iterator[None]:
    """Break the parallel forward in one way."""
    real = subject.ShardedForward
    real_shard, real_before, real_after = real._shard, real.before, real.after
    if name == "coords of rank 0":

        def shard(self: Any, x: torch.Tensor, dim: int) -> torch.Tensor:
            own = real_shard(self, x, dim)
            return x.narrow(dim, 0, own.shape[dim]) if dim == 2 else own

        patch = mock.patch.object(subject.ShardedForward, "_shard", shard)
    elif name == "timesteps of rank 0":

        def shard(self: Any, x: torch.Tensor, dim: int) -> torch.Tensor:
            own = real_shard(self, x, dim)
            return x.narrow(dim, 0, own.shape[dim]) if x.ndim == 2 else own

        patch = mock.patch.object(subject.ShardedForward, "_shard", shard)
    elif name == "padding attended":

        def before(self: Any, *args: Any) -> Any:
            result = real_before(self, *args)
            self.real_tokens = self.call.num_tokens
            self.call.num_tokens = result[1]["hidden_states"].shape[1] * state.sequence_degree
            return result

        def after(self: Any, *args: Any) -> Any:
            self.call.num_tokens = self.real_tokens
            return real_after(self, *args)

        patch = mock.patch.multiple(subject.ShardedForward, before=before, after=after)
    elif name == "no keys from other ranks":

        class Alone(LTX2PerturbedAttnProcessor):
            def __init__(self, *args: Any, **kwargs: Any) -> None:
                super().__init__()

        patch = mock.patch.object(subject, "VideoSelfAttention", Alone)
    elif name == "audio part not merged":
        patch = mock.patch.object(subject, "all_gather_parts", lambda o, lse, group: (o[None], lse[None]))
    elif name == "huge padding":  # not a fault: must change nothing
        patch = mock.patch.object(subject.ShardedForward, "pad_value", 1e4)
    else:
        raise KeyError(name)
    with patch:
        yield


@contextlib.contextmanager
def parallel(model: LTX2VideoTransformer3DModel, state: ParallelState) -> Iterator[None]:
    handle = subject.parallelize(model, state)
    try:
        yield
    finally:
        handle.remove()


class CountBytes(TorchDispatchMode):
    """Bytes that this rank hands to collectives for other ranks, by operator."""

    def __init__(self, rank_in_group: int) -> None:
        super().__init__()
        self.moved = {"all_to_all": 0, "all_gather": 0}
        self.rank = rank_in_group

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops._c10d_functional.all_to_all_single.default:
            tensor, _, send_sizes, _ = args
            row = tensor[0].numel() * tensor.element_size()
            self.moved["all_to_all"] += row * sum(n for peer, n in enumerate(send_sizes) if peer != self.rank)
        elif func is torch.ops._c10d_functional.all_gather_into_tensor.default:
            self.moved["all_gather"] += args[0].numel() * args[0].element_size()
        return func(*args, **(kwargs or {}))


def check_cases(degrees: list[tuple[int, int]], device: str = "cpu") -> dict[str, dict[str, Any]]:
    """On every rank: all cases and faults for each (ulysses, ring), in one start of the processes."""
    report: dict[str, dict[str, Any]] = {}
    world = int(os.environ["WORLD_SIZE"])
    with start(ulysses_degree=world, device=device, timeout=timedelta(seconds=60)) as session:
        for rope_type in ("split", "interleaved"):
            make_transformer(rope_type).to(session.state.device)
        for ulysses, ring in degrees:
            state = build_state(
                session.state.rank,
                device=session.state.device,
                timeout=timedelta(seconds=60),
                ulysses_degree=ulysses,
                ring_degree=ring,
                data_parallel_degree=1,
            )
            for case in CASES:
                report[f"u{ulysses}r{ring} {case.name}"] = _check(case, state)
            report[f"u{ulysses}r{ring} faults"] = _check_faults(state)
            report[f"u{ulysses}r{ring} bytes"] = _check_bytes(state)
    return report


def _check(case: Case, state: ParallelState) -> dict[str, Any]:
    model = make_transformer(case.rope_type)
    wanted = forward(model, case)
    with parallel(model, state):
        video, audio = forward(model, case)
    with fault("huge padding", state), parallel(model, state):
        padded = forward(model, case)
    return {
        "video": deviation(video, wanted[0]),
        "audio": deviation(audio, wanted[1]),
        "same_on_all_ranks": _same_everywhere(video, state) and _same_everywhere(audio, state),
        "padding_changes_nothing": torch.equal(video, padded[0]) and torch.equal(audio, padded[1]),
        "stock_again": torch.equal(forward(model, case)[0], wanted[0]),
    }


def _same_everywhere(x: torch.Tensor, state: ParallelState) -> bool:
    gathered = [torch.empty_like(x) for _ in range(state.sequence_degree)]
    dist.all_gather(gathered, x.contiguous(), group=state.sequence_group)
    return all(torch.equal(x, other) for other in gathered)


def _check_faults(state: ParallelState) -> dict[str, Any]:
    """What each fault does to (video, audio), in standard deviations, on an i2v call whose tokens do not divide."""
    case = Case("faults", video=(5, 1, 5), i2v=True)
    model = make_transformer("split")
    wanted = forward(model, case)
    found = {}
    for name in FAULTS:
        with fault(name, state), parallel(model, state):
            got = forward(model, case)
        found[name] = (deviation(got[0], wanted[0]), deviation(got[1], wanted[1]))
    return found


FAULTS = {
    "coords of rank 0": ("video", "audio"),
    "timesteps of rank 0": ("video", "audio"),
    "padding attended": ("video", "audio"),
    "no keys from other ranks": ("video", "audio"),
    "audio part not merged": ("audio",),
}


def _check_bytes(state: ParallelState) -> dict[str, Any]:
    case = Case("bytes", video=(3, 3, 3), batch=2)
    model = make_transformer("split")
    # Every group is counted with this rank's place in it; the hybrid would need two, so it is left out.
    place = state.ulysses_rank if state.ring_degree == 1 else state.ring_rank
    with parallel(model, state), CountBytes(place) as counter:
        forward(model, case)
    computed = step_bytes(
        model.config, state, batch=2, video_tokens=case.num_tokens, audio_tokens=case.audio_tokens, itemsize=4
    )
    return {"counted": counter.moved, "computed": computed}
