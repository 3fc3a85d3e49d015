"""Bytes that sequence parallelism moves in one forward of the transformer; a test counts them under gloo."""

from dataclasses import dataclass
from typing import Any

from layers.parallel_state import ParallelState, shard_length
from layers.partial_attention import partial_attention_bytes
from layers.ring import ring_bytes
from layers.ulysses import all_to_all_bytes


@dataclass(frozen=True)
class StepBytes:
    """Bytes one rank contributes in one forward, by cause."""

    ulysses: int
    ring: int
    audio_merge: int
    output_gather: int

    @property
    def total(self) -> int:
        return self.ulysses + self.ring + self.audio_merge + self.output_gather


def step_bytes(
    config: Any, state: ParallelState, *, batch: int, video_tokens: int, audio_tokens: int, itemsize: int
) -> StepBytes:
    """What one rank contributes to the collectives of one forward of a transformer with this config.

    itemsize is that of the activations; the audio merge is fp32 whatever it is. All-to-alls and the ring count what
    leaves the rank; the gathers what it contributes, which every other rank receives.
    """
    if state.sequence_degree == 1:
        return StepBytes(0, 0, 0, 0)
    layers, heads, head_dim = config.num_layers, config.num_attention_heads, config.attention_head_dim
    shard = shard_length(video_tokens, state.sequence_degree)
    scatter = all_to_all_bytes(
        batch=batch,
        shard_tokens=shard,
        heads=heads,
        head_dim=head_dim,
        ranks=state.ulysses_degree,
        itemsize=itemsize,
    )
    ring = ring_bytes(
        batch=batch,
        block_tokens=shard * state.ulysses_degree,
        heads=heads // state.ulysses_degree,
        head_dim=head_dim,
        ranks=state.ring_degree,
        itemsize=itemsize,
    )
    merge = partial_attention_bytes(
        batch=batch,
        queries=audio_tokens,
        heads=config.audio_num_attention_heads,
        head_dim=config.audio_attention_head_dim,
    )
    return StepBytes(
        ulysses=4 * layers * scatter,
        ring=layers * ring,
        audio_merge=layers * merge,
        output_gather=batch * shard * config.out_channels * itemsize,
    )
