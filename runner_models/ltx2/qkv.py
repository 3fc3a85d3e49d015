"""One GEMM for Q, K and V of a decoder attention module, without a second copy of its weights.

The three weights become views of one block of memory, Q then K then V, so that the block is a strided view of the
first: nothing is kept beside the module's own parameters. Saving and load_state_dict work on the views as on any
parameter. `.to`, deepcopy, assign=True and offloading give each weight its own memory again: `joint_weights` sees it.
"""

import functools
import logging
from typing import Any

import torch
import torch.nn.functional as F

logger = logging.getLogger(__name__)

_NAMES = ("to_q", "to_k", "to_v")


def fuse_qkv(attn: Any) -> None:
    """Move to_q, to_k and to_v of a stock LTX2VideoVaeNeighborhoodAttention into one block of memory, in place.

    Raises ValueError where one of them is not a plain linear layer (an adapter is attached), or where their weights are
    not in memory on one device in one dtype.
    """
    layers = _linears(attn)
    # In inference mode the block would be an inference tensor, which a parameter cannot become a view of.
    with torch.inference_mode(False), torch.no_grad():
        for name in ("weight", "bias"):
            own = [getattr(layer, name) for layer in layers]
            if any(x.is_meta or (x.device, x.dtype) != (own[0].device, own[0].dtype) for x in own):
                found = ", ".join(f"{n} {x.dtype} on {x.device}" for n, x in zip(_NAMES, own, strict=True))
                raise ValueError(
                    f"the decoder's {name}s must be on one device in one dtype to be used together; got {found} "
                    "(layer-wise offloading is not supported, model offloading is)"
                )
            parts = torch.cat([x.detach() for x in own]).chunk(3)
            for x, part in zip(own, parts, strict=True):
                x.data = part


def project(attn: Any, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Q, K and V (..., heads, head_dim) of hidden_states (..., dim): views of one product, before norms and rotation.

    Raises ValueError as fuse_qkv does.
    """
    qkv = F.linear(hidden_states, *joint_weights(attn))
    q, k, v = qkv.unflatten(-1, (3, attn.heads, attn.head_dim)).unbind(-3)
    return q, k, v


def joint_weights(attn: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Weight (3 dim, dim) and bias (3 dim,) of Q, K and V together.

    Fuses again where the weights have been moved, cast or replaced; that is logged once. Inference only: no gradient
    reaches the weights. Raises ValueError as fuse_qkv does.
    """
    layers = _linears(attn)
    if not _is_fused([layer.weight for layer in layers]) or not _is_fused([layer.bias for layer in layers]):
        fuse_qkv(attn)
        _say_fused_again()
    return _block(layers[0].weight), _block(layers[0].bias)


def plain_linear(module: Any, name: str) -> torch.nn.Linear:
    """The linear layer `name` of a decoder module. Raises ValueError where an adapter has taken its place: its weight
    alone would then not be what the layer computes.
    """
    layer = module.get_submodule(name)
    if type(layer) is not torch.nn.Linear:
        raise ValueError(
            f"{name} of the decoder is a {type(layer).__name__}, not a plain linear layer: "
            "an adapter is attached. Merge it into the weights (merge_and_unload or fuse_lora) before decoding."
        )
    return layer


def _linears(attn: Any) -> list[torch.nn.Linear]:
    return [plain_linear(attn, name) for name in _NAMES]


def _is_fused(parts: list[Any]) -> bool:
    """Whether Q, K and V follow each other in one block: pointers and types alone, no tensor is read."""
    first = parts[0]
    start, step = first.data_ptr(), first.numel() * first.element_size()
    storage = first.untyped_storage().data_ptr()
    return not first.is_meta and all(
        x.data_ptr() == start + i * step
        and x.untyped_storage().data_ptr() == storage
        and (x.shape, x.dtype, x.device) == (first.shape, first.dtype, first.device)
        and x.is_contiguous()
        for i, x in enumerate(parts)
    )


def _block(first: torch.Tensor) -> torch.Tensor:
    """All three, as a view of the first."""
    shape = (3 * first.shape[0], *first.shape[1:])
    return first.detach().as_strided(shape, first.stride())


@functools.cache
def _say_fused_again() -> None:
    logger.info(
        "decoder attention: the weights of Q, K and V have been moved, cast or replaced; joined again (said once)"
    )
