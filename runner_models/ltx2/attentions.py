"""The attention kernels of a run, chosen before anything is downloaded or loaded."""

from dataclasses import dataclass

import torch

from layers.attention_backends import AttentionBackend, select_backend
from layers.neighborhood_attention.select import Selection
from layers.parallel_state import ParallelState, check_degrees
from runner_models.api import SetupError
from runner_models.ltx2.decoder_attention import select_decoder_attention
from runner_models.ltx2.load import read_config
from runner_models.ltx2.recipes import Recipe


@dataclass(frozen=True)
class Attentions:
    """`video`: the kernel of the transformer's video self-attention, None for torch's own; `decoder`: the decoder's."""

    video: AttentionBackend | None
    decoder: Selection


def choose_attentions(
    model: str,
    recipe: Recipe,
    *,
    load_format: str,
    state: ParallelState,
    dtype: torch.dtype,
    attention_backend: str | None = None,
    decoder_attention: str = "auto",
) -> Attentions:
    """Check the ranks against the model's heads, and probe the kernels on this device. Collective over all ranks.

    Args:
        model, load_format: which checkpoint, as on the command line.
        attention_backend: a name of `layers.attention_backends`; None for torch's own.
        decoder_attention: a name of `layers.neighborhood_attention.select.CHOICES`.

    Raises:
        SetupError: ranks that do not divide the heads, or an attention that this machine lacks.
    """
    transformer, decoder = (
        read_config(name, model, recipe, load_format=load_format) for name in ("transformer", "diffusion_decoder")
    )
    video = None
    try:
        check_degrees(
            world_size=state.world_size,
            ulysses_degree=state.ulysses_degree,
            ring_degree=state.ring_degree,
            data_parallel_degree=state.data_parallel_degree,
            num_heads=transformer["num_attention_heads"],
        )
        if attention_backend is not None or state.ring_degree > 1:
            video = select_backend(
                attention_backend,
                device=state.device,
                dtype=dtype,
                head_dim=transformer["attention_head_dim"],
                needs_lse=state.ring_degree > 1,
            )
    except ValueError as error:
        raise SetupError(str(error)) from error
    selection = select_decoder_attention(
        decoder_attention, decoder, device=state.device, dtype=dtype, everywhere=state.all_gather_object
    )
    return Attentions(video, selection)
