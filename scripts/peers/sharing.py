"""The same weights in several modules at once: 66 GiB of them leave no room for a second copy."""

import copy
from dataclasses import replace
from typing import Any

import torch

from runner_models.ltx2.load import Parts


def share(module: Any) -> Any:
    """Another module over the very parameters and buffers of `module`, its hooks and processors its own."""
    tensors = (*module.parameters(), *module.buffers())
    return copy.deepcopy(module, {id(tensor): tensor for tensor in tensors})


def rebuild(module: Any, kind: Any) -> Any:
    """`module` as an instance of `kind`, a diffusers class with the same parameters, over the very tensors of `module`.

    Raises:
        RuntimeError: `kind` has other parameters.
    """
    with torch.device("meta"):
        other = kind.from_config(module.config)
    other.requires_grad_(False)
    other.load_state_dict(module.state_dict(keep_vars=True), assign=True)
    for name, buffer in list(other.named_buffers()):
        if buffer.is_meta:  # not in the state dict
            owner, _, leaf = name.rpartition(".")
            other.get_submodule(owner)._buffers[leaf] = module.get_buffer(name)
    left = [name for name, tensor in (*other.named_parameters(), *other.named_buffers()) if tensor.is_meta]
    if left:
        raise RuntimeError(f"{kind.__name__} has no weights for {', '.join(left[:3])}")
    return other.eval()


def share_parts(parts: Parts) -> Parts:
    """Parts whose transformer, autoencoder and decoder may be changed without the others seeing it."""
    components = dict(parts.pipeline.components)
    for name in ("transformer", "vae"):
        components[name] = share(components[name])
    components["scheduler"] = copy.deepcopy(components["scheduler"])
    pipeline = type(parts.pipeline)(**components)
    pipeline.set_progress_bar_config(disable=True)
    return replace(parts, pipeline=pipeline, diffusion_decoder=share(parts.diffusion_decoder))
