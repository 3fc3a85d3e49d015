"""Models the runner knows: a name on the command line -> how that model is made.

The registry is read before any weight is, so nothing here imports torch or diffusers.
"""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import TYPE_CHECKING

from runner_models.ltx2.recipes import DISTILLED, FULL, Recipe

if TYPE_CHECKING:
    from layers.parallel_state import ParallelState
    from runner_models.ltx2.attentions import Attentions
    from runner_models.ltx2.decoder.options import DecodeOptions
    from runner_models.ltx2.load import Source
    from runner_models.ltx2.pipeline import Ltx2Model

HUB_REPOSITORY = "Lightricks/LTX-2.5-Diffusers"
TINY_NAMES = ("tiny", "tiny-full")

_NAMES: dict[str, Recipe] = {
    HUB_REPOSITORY: DISTILLED,
    "LTX-2.5": DISTILLED,
    "LTX-2.5-distilled": DISTILLED,
    "LTX-2.5-full": FULL,
    "tiny": DISTILLED,
    "tiny-full": FULL,
}


def model_names() -> tuple[str, ...]:
    """Every name `--model` takes beside a local folder."""
    return tuple(_NAMES)


def find_recipe(model: str) -> Recipe:
    """The recipe for `model`, a registered name or a checkpoint folder in the hub repository's layout.

    A folder runs the distilled recipe; `FOLDER:full` runs the full one.

    Raises:
        ValueError: neither a registered name nor a folder with a `model_index.json`; the message names the nearest.
    """
    if model in _NAMES:
        return _NAMES[model]
    folder, recipe = split_folder(model)
    if folder.is_dir():
        if (folder / "model_index.json").is_file():
            return recipe
        raise ValueError(
            f"--model {model} is a folder without model_index.json; expected the layout of {HUB_REPOSITORY}."
        )
    lowered = {name.lower(): name for name in _NAMES}
    near = difflib.get_close_matches(model.lower(), lowered, n=1, cutoff=0.5)
    hint = f" Did you mean {lowered[near[0]]}?" if near else ""
    raise ValueError(
        f"--model {model} is neither a known model nor a folder.{hint} Known: {', '.join(_NAMES)}, or a local folder."
    )


def split_folder(model: str) -> tuple[Path, Recipe]:
    """`FOLDER` or `FOLDER:full` -> the folder and its recipe; what can be no path is a folder that does not exist."""
    path = Path(model.removesuffix(":full"))
    try:
        path = path.expanduser()
        path.is_dir()
    except (RuntimeError, OSError):  # ~nobody; a name that is too long
        path = Path("/nonexistent")
    return path, FULL if model.endswith(":full") else DISTILLED


def load_model(
    model: str,
    *,
    device: str = "cpu",
    dtype: str | None = None,
    load_format: str = "auto",
    offload: bool = False,
    state: ParallelState | None = None,
    source: Source | None = None,
    attentions: Attentions | None = None,
    decode: DecodeOptions | None = None,
) -> Ltx2Model:
    """Find, load and return a model, ready to generate.

    Args:
        model: a registered name, or a checkpoint folder (see `find_recipe`).
        device: a torch device, "cpu" or "cuda"; `state.device` wins.
        dtype: "float32", "bfloat16" or "float16"; None for float32 on a CPU and bfloat16 on a GPU.
        load_format: "auto" reads the checkpoint; "dummy" builds the released architecture with random weights.
        offload: keep each component on the host except while it runs; needs a GPU.
        state: this process's place among its ranks; None for one process.
        source: what `runner_models.ltx2.load.resolve` found; None to look now.
        attentions: what `runner_models.ltx2.attentions.choose_attentions` chose; None for its defaults.
        decode: how latents become frames; None for the exact decode, on one rank, at once where that fits.

    Raises:
        ValueError: an unknown model; `SetupError`, one of them, for a checkpoint that cannot be used, ranks that do not
            divide its heads, or an attention that this machine lacks. All before any weight is read.
    """
    import torch

    from layers.parallel_state import ParallelState
    from runner_models.ltx2.attentions import choose_attentions
    from runner_models.ltx2.load import check_folder, load, resolve
    from runner_models.ltx2.pipeline import Ltx2Model

    recipe = find_recipe(model)
    state = state or ParallelState(device=torch.device(device))
    torch_dtype = getattr(torch, dtype or ("float32" if state.device.type == "cpu" else "bfloat16"))
    if attentions is None:
        check_folder(model, recipe, load_format=load_format)
        attentions = choose_attentions(model, recipe, load_format=load_format, state=state, dtype=torch_dtype)
    source = source or resolve(model, recipe, load_format=load_format)
    parts = load(source, recipe, device=state.device, dtype=torch_dtype, offload=offload)
    return Ltx2Model(parts, recipe, source=source, state=state, attentions=attentions, decode=decode, offload=offload)
