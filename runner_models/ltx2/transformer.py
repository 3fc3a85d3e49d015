"""Sequence-parallel LTX-2.5 transformer: shard the video tokens, call diffusers' own forward, gather its output.

Parallelism is applied from outside. A hook before the model's forward replaces everything that has one entry per video
token by this rank's shard of it; the audio stream and the prompts stay whole on every rank; a hook after it gathers
the video output. Video tokens meet in two places of each block only, and only these get another attention processor:
- attn1, video self-attention: Ulysses all-to-all, ring, or both.
- video_to_audio_attn, a few audio queries over all video tokens: every rank attends to its own shard, and the partial
  results are merged in rank order, so that the audio stream has the same bits on every rank.

Layouts: B batch, S this rank's video tokens (padding included), A audio tokens, H heads, D head_dim.
"""

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from diffusers.models.transformers.transformer_ltx2 import (
    LTX2Attention,
    LTX2VideoTransformer3DModel,
    apply_interleaved_rotary_emb,
    apply_split_rotary_emb,
)

from layers.attention_backends import DEFAULT_BACKEND, AttendLse, AttentionBackend, default_backend, few_queries_lse
from layers.parallel_state import ParallelState, valid_tokens
from layers.partial_attention import all_gather_parts, attend_part, merge_parts
from layers.ring import ring_attention
from layers.ulysses import finish_scatter_heads, gather_heads, start_scatter_heads

RotaryEmb = tuple[torch.Tensor, torch.Tensor]


@dataclass
class _Call:
    """What the processors must know of the forward in progress; set by the hook before it."""

    num_tokens: int = 0


@dataclass(frozen=True)
class Parallelized:
    """The hooks and processors put onto a transformer; remove() makes it stock again."""

    transformer: LTX2VideoTransformer3DModel
    hooks: tuple[torch.utils.hooks.RemovableHandle, ...]
    stock_processors: tuple[tuple[LTX2Attention, Any], ...]

    def remove(self) -> None:
        for hook in self.hooks:
            hook.remove()
        for attention, processor in self.stock_processors:
            attention.set_processor(processor)


def parallelize(
    transformer: LTX2VideoTransformer3DModel, state: ParallelState, *, backend: AttentionBackend | None = None
) -> Parallelized:
    """Make the transformer's forward sequence-parallel over `state`, in place; every rank calls it with whole inputs.

    Inputs and outputs keep the stock shapes on every rank. `backend` is attn1's kernel, None the default; with the
    default and one rank nothing is changed at all. Apply it before compile_repeated_blocks. Raises ValueError if the
    Ulysses degree does not divide the heads, or a ring is asked for with a backend that gives no log-sum-exp.
    """
    config: Any = transformer.config
    heads = config.num_attention_heads
    if heads % state.ulysses_degree:
        raise ValueError(f"--ulysses_degree {state.ulysses_degree} does not divide {heads} attention heads.")
    if state.ring_degree > 1 and backend is not None and backend.attend_lse is None:
        raise ValueError(f"--attention_backend {backend.name} gives no log-sum-exp, which --ring_degree needs.")
    backend = backend or default_backend(state.device, transformer.dtype)
    processors: list[tuple[LTX2Attention, Any]] = []
    hooks: list[torch.utils.hooks.RemovableHandle] = []
    call = _Call()
    block: Any
    for block in transformer.transformer_blocks:
        if state.sequence_degree > 1 or backend.name != DEFAULT_BACKEND:
            processors.append(_swap(block.attn1, VideoSelfAttention(state, call, backend=backend)))
        if state.sequence_degree > 1:
            # Whatever is named for attn1: this one gives the log-sum-exp, and its queries are few.
            v2a = VideoToAudioAttention(state, call, attend_lse=few_queries_lse(state.device, transformer.dtype))
            processors.append(_swap(block.video_to_audio_attn, v2a))
    if state.sequence_degree > 1:
        sharding = ShardedForward(state, call)
        hooks.append(transformer.register_forward_pre_hook(sharding.before, with_kwargs=True))
        hooks.append(transformer.register_forward_hook(sharding.after))
    return Parallelized(transformer, tuple(hooks), tuple(processors))


def _swap(attention: LTX2Attention, processor: Any) -> tuple[LTX2Attention, Any]:
    stock = attention.processor
    attention.set_processor(processor)
    return attention, stock


class ShardedForward:
    """Forward hooks of the transformer: whole inputs -> this rank's shard, the shard's output -> whole output."""

    pad_value = 0.0

    def __init__(self, state: ParallelState, call: _Call) -> None:
        self.state = state
        self.call = call

    def before(
        self, transformer: LTX2VideoTransformer3DModel, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Shard hidden_states, video_coords, and what is per token of timestep and video_keyframes_mask.

        Raises ValueError for video_self_attention_mask: no pipeline of this runner passes one.
        """
        given = _SIGNATURE.bind_partial(transformer, *args, **kwargs).arguments
        given.pop("self")
        if given.get("video_self_attention_mask") is not None:
            raise ValueError("video_self_attention_mask is not supported with more than one sequence-parallel rank.")
        hidden_states, timestep = given["hidden_states"], given["timestep"]
        self.call.num_tokens = num_tokens = hidden_states.shape[1]
        if given.get("video_coords") is None:
            given["video_coords"] = transformer.rope.prepare_video_coords(
                hidden_states.shape[0],
                given["num_frames"],
                given["height"],
                given["width"],
                hidden_states.device,
                fps=given.get("fps", 24.0),
            )
        if given.get("audio_timestep") is None:
            given["audio_timestep"] = timestep  # the stock default, which must not see the shard
        given["hidden_states"] = self._shard(hidden_states, 1)
        given["video_coords"] = self._shard(given["video_coords"], 2)
        for name in ("timestep", "video_keyframes_mask"):
            value = given.get(name)
            if value is not None and value.ndim > 1 and value.shape[1] == num_tokens > 1:
                given[name] = self._shard(value, 1)
        return (), given

    def after(self, transformer: LTX2VideoTransformer3DModel, args: tuple[Any, ...], output: Any) -> Any:
        """Gather the video output on every rank; the audio output is whole already."""
        video = output[0] if isinstance(output, tuple) else output.sample
        video = self.state.gather(video, dim=1, length=self.call.num_tokens)
        if isinstance(output, tuple):
            return (video, *output[1:])
        output.sample = video
        return output

    def _shard(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        return self.state.shard(x, dim=dim, pad_value=self.pad_value)


_SIGNATURE = inspect.signature(LTX2VideoTransformer3DModel.forward)


class VideoSelfAttention:
    """Processor of attn1: every video token attends to all of them, wherever they are.

    Computes what diffusers' LTX2PerturbedAttnProcessor does. Padding is never attended: after the all-to-all it is a
    suffix of the ring block, and each block's count of valid keys follows from the token count.
    """

    def __init__(self, state: ParallelState, call: _Call, *, backend: AttentionBackend) -> None:
        self.state = state
        self.call = call
        self.backend = backend

    # perturbation_mask and all_perturbed must be in the signature: LTX2Attention drops what a processor does not name.
    def __call__(
        self,
        attn: LTX2Attention,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        query_rotary_emb: RotaryEmb | None = None,
        key_rotary_emb: RotaryEmb | None = None,
        perturbation_mask: torch.Tensor | None = None,
        all_perturbed: torch.Tensor | bool | None = None,
    ) -> torch.Tensor:
        """(B, S, H * D) of this rank's tokens -> the same shape."""
        if attention_mask is not None:
            raise ValueError("video self-attention takes no attention mask here.")
        assert encoder_hidden_states is None
        value = attn.to_v(hidden_states)
        if all_perturbed is None:
            all_perturbed = torch.all(perturbation_mask == 0) if perturbation_mask is not None else False
        if all_perturbed:
            out = value
        else:
            out = self._attend(attn, hidden_states, value, query_rotary_emb, key_rotary_emb or query_rotary_emb)
            if perturbation_mask is not None:
                out = torch.lerp(value, out, perturbation_mask)
        return _project(attn, out, hidden_states)

    def _attend(
        self,
        attn: LTX2Attention,
        hidden_states: torch.Tensor,
        value: torch.Tensor,
        query_rotary_emb: RotaryEmb | None,
        key_rotary_emb: RotaryEmb | None,
    ) -> torch.Tensor:
        state = self.state

        def scatter(x: torch.Tensor) -> torch.Tensor:
            x = x.unflatten(2, (attn.heads, -1))
            return x if state.ulysses_group is None else start_scatter_heads(x, state.ulysses_group)

        # V and K travel while Q is being computed.
        v = scatter(value)
        k = scatter(_rotate(attn, attn.norm_k(attn.to_k(hidden_states)), key_rotary_emb))
        q = scatter(_rotate(attn, attn.norm_q(attn.to_q(hidden_states)), query_rotary_emb))
        if state.ulysses_group is not None:
            q, k, v = (finish_scatter_heads(x) for x in (q, k, v))
        if state.ring_group is not None:
            valid = [self._valid_in_block(block, k.shape[1]) for block in range(state.ring_degree)]
            assert self.backend.attend_lse is not None
            out = ring_attention(self.backend.attend_lse, q, k, v, valid=valid, group=state.ring_group)
        else:
            valid_keys = self.call.num_tokens if state.sequence_degree > 1 else k.shape[1]
            out = self.backend.attend(q, k[:, :valid_keys], v[:, :valid_keys])
        if state.ulysses_group is not None:
            out = gather_heads(out, state.ulysses_group)
        return out.flatten(2, 3).to(value.dtype)

    def _valid_in_block(self, block: int, length: int) -> int:
        """Real tokens of a ring rank's block of `length` tokens."""
        return min(max(self.call.num_tokens - block * length, 0), length)


class VideoToAudioAttention:
    """Processor of video_to_audio_attn: replicated audio queries over the video tokens of every rank.

    Each rank contributes 4 * B * A * H * (D + 1) bytes; gathering K and V instead would move 2 * B * S * H * D elements
    from each rank to each other one.
    """

    def __init__(self, state: ParallelState, call: _Call, *, attend_lse: AttendLse) -> None:
        self.state = state
        self.call = call
        self.attend_lse = attend_lse

    def __call__(
        self,
        attn: LTX2Attention,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        query_rotary_emb: RotaryEmb | None = None,
        key_rotary_emb: RotaryEmb | None = None,
        perturbation_mask: torch.Tensor | None = None,
        all_perturbed: torch.Tensor | bool | None = None,
    ) -> torch.Tensor:
        """Audio (B, A, C_audio) over this rank's video (B, S, C) -> (B, A, C_audio), the same bits on every rank."""
        assert encoder_hidden_states is not None
        assert self.state.sequence_group is not None
        assert attention_mask is None, "the stock block passes no mask here"
        assert perturbation_mask is None, "the stock block perturbs self-attention only"
        q = _rotate(attn, attn.norm_q(attn.to_q(hidden_states)), query_rotary_emb)
        k = _rotate(attn, attn.norm_k(attn.to_k(encoder_hidden_states)), key_rotary_emb)
        v = attn.to_v(encoder_hidden_states)
        q, k, v = (x.unflatten(2, (attn.heads, -1)) for x in (q, k, v))
        valid = valid_tokens(self.call.num_tokens, self.state.sequence_degree, self.state.sequence_rank)
        part = attend_part(self.attend_lse, q, k, v, valid=valid)
        out = merge_parts(*all_gather_parts(*part, self.state.sequence_group))
        return _project(attn, out.flatten(2, 3).to(hidden_states.dtype), hidden_states)


def _rotate(attn: LTX2Attention, x: torch.Tensor, emb: RotaryEmb | None) -> torch.Tensor:
    if emb is None:
        return x
    return apply_split_rotary_emb(x, emb) if attn.rope_type == "split" else apply_interleaved_rotary_emb(x, emb)


def _project(attn: LTX2Attention, out: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
    """Per-head gates, computed from the attention's input, then the output projection, as diffusers does."""
    if attn.to_gate_logits is not None:
        gates = 2.0 * torch.sigmoid(attn.to_gate_logits(hidden_states))
        out = (out.unflatten(2, (attn.heads, -1)) * gates.unsqueeze(-1)).flatten(2, 3)
    return attn.to_out[1](attn.to_out[0](out))
