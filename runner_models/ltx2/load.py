"""Where LTX-2.5 weights come from: the hub, a folder, the tiny checkpoint, or random numbers."""

import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from runner_models import HUB_REPOSITORY, TINY_NAMES, split_folder
from runner_models.api import SetupError
from runner_models.ltx2.build import COMPONENTS, build_component, component_config, make_scheduler
from runner_models.ltx2.recipes import Recipe
from runner_models.ltx2.tiny import stand_in_tokenizer, tiny_checkpoint, tiny_config

logger = logging.getLogger(__name__)

_PIPELINE_FOLDERS = ("scheduler", "text_encoder", "tokenizer", "connectors", "vae", "audio_vae", "vocoder")


@dataclass(frozen=True)
class Source:
    """A checkpoint folder, or None for random weights; `revision` is the hub commit, "tiny-v1", "dummy" or None."""

    folder: Path | None
    revision: str | None
    random_weights: bool


@dataclass(frozen=True)
class Parts:
    """The loaded models of one recipe, all on one device in one dtype (or on the host, for offloading)."""

    pipeline: Any
    """diffusers LTX2Pipeline: text encoder, connectors, transformer, VAEs, vocoder, scheduler."""
    latent_upsampler: Any | None
    diffusion_decoder: Any


def resolve(model: str, recipe: Recipe, *, load_format: str, revision: str | None = None, fetch: bool = True) -> Source:
    """Find (and download or make) the checkpoint for `--model`, reading no weight.

    `revision` is a commit or branch of the hub repository, None for its main branch. With `fetch` False the hub is not
    asked: for the ranks of a machine where another rank has fetched it.

    Raises:
        SetupError: a folder that lacks components, or a repository that is gated, missing or unreachable.
    """
    if load_format == "dummy":
        if model in TINY_NAMES or split_folder(model)[0].is_dir():
            raise SetupError(
                f"--load_format dummy builds the released architecture and reads no checkpoint; --model {model} names "
                "one. Use --model LTX-2.5 or LTX-2.5-full, or leave --load_format out."
            )
        _say_noise("--load_format dummy")
        return Source(None, "dummy", random_weights=True)
    if model in TINY_NAMES:
        _say_noise(f"--model {model}")
        folder = tiny_checkpoint()
        return Source(folder, folder.name, random_weights=True)
    named = local_folder(model, load_format=load_format)
    folder = named or _download(recipe, revision=revision, local_files_only=not fetch)
    return Source(_checked(folder, recipe, model), None if named else folder.name, random_weights=False)


def _say_noise(flag: str) -> None:
    logger.info("%s: random weights, the picture and the sound are noise", flag)


def local_folder(model: str, *, load_format: str) -> Path | None:
    """The checkpoint folder that `--model` names, or None for the hub's, the tiny and the dummy one."""
    folder, _ = split_folder(model)
    return folder if load_format != "dummy" and model not in TINY_NAMES and folder.is_dir() else None


def check_folder(model: str, recipe: Recipe, *, load_format: str) -> None:
    """Refuse a checkpoint folder that is not whole; every json and the header of every weight file is read, once.

    Raises:
        SetupError: naming what is missing or damaged.
    """
    folder = local_folder(model, load_format=load_format)
    if folder is not None:
        _checked(folder, recipe, model)


def read_config(name: str, model: str, recipe: Recipe, *, load_format: str) -> dict[str, Any]:
    """The config of one component of `--model`, before anything is downloaded or made.

    The released names give the released architecture that is kept here, a folder its own (`check_folder` says whether
    it is whole). `name` is one of `build.COMPONENTS`; "transformer" means the recipe's.

    Raises:
        SetupError: a config that is missing, or no json.
    """
    if model in TINY_NAMES and load_format != "dummy":
        return tiny_config(name)
    folder = local_folder(model, load_format=load_format)
    if folder is None:
        return component_config(name)
    return _read_json(folder / (recipe.transformer_subfolder if name == "transformer" else name) / "config.json")


def needed_folders(recipe: Recipe) -> tuple[str, ...]:
    """Sub-folders of a checkpoint that this recipe reads."""
    upsampler = ("latent_upsampler",) if recipe.stages == 2 else ()
    return (*_PIPELINE_FOLDERS, recipe.transformer_subfolder, *upsampler, "diffusion_decoder")


def _checked(folder: Path, recipe: Recipe, model: str) -> Path:
    """The folder, if it holds every component whole: names, json, the shards of an index, the length of each file."""
    no_weights = {"scheduler", "tokenizer"}
    for name in needed_folders(recipe):
        files = {path.name for path in (folder / name).glob("*")} if (folder / name).is_dir() else set()
        if not files:
            raise SetupError(f"--model {model}: {folder} has no {name}/; the layout of {HUB_REPOSITORY} is needed.")
        for path in (folder / name).glob("*.json"):
            content = _read_json(path)
            shards = set(content.get("weight_map", {}).values()) if path.name.endswith(".index.json") else set()
            if shards - files:
                raise SetupError(f"--model {model}: {folder / name} lacks {min(shards - files)}; fetch it again.")
        if name not in no_weights and not any(file.endswith(".safetensors") for file in files):
            raise SetupError(f"--model {model}: {folder / name} has no .safetensors file; other formats are not read.")
    parameter_counts(folder, recipe)
    return folder


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise SetupError(f"{path} cannot be read ({error}); fetch it again.") from error


def _download(recipe: Recipe, *, revision: str | None, local_files_only: bool) -> Path:
    """Fetch what this recipe needs from the hub (safetensors and json only) and return the snapshot folder."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    patterns = ["model_index.json"]
    for name in needed_folders(recipe):
        patterns += [f"{name}/*.json", f"{name}/*.safetensors", f"{name}/*.model", f"{name}/*.jinja"]
    page = f"https://huggingface.co/{HUB_REPOSITORY}"
    otherwise = "or give a local folder: --model /path/to/LTX-2.5-Diffusers (--model tiny needs no weights)"
    try:
        options: dict[str, Any] = {"revision": revision, "local_files_only": local_files_only}
        return Path(snapshot_download(HUB_REPOSITORY, allow_patterns=patterns, **options))
    except GatedRepoError as error:
        raise SetupError(
            f"{HUB_REPOSITORY} is gated: accept its terms at {page}, set HF_TOKEN to a token of that account, "
            f"{otherwise}."
        ) from error
    except RevisionNotFoundError as error:
        raise SetupError(f"--revision {revision} is no commit or branch of {HUB_REPOSITORY}; see {page}.") from error
    except RepositoryNotFoundError as error:
        raise SetupError(
            f"{HUB_REPOSITORY} was not found, or is not visible to this token: check HF_TOKEN, {otherwise}."
        ) from error
    except (LocalEntryNotFoundError, OfflineModeIsEnabled) as error:
        raise SetupError(
            f"{HUB_REPOSITORY} is not in the local cache and the hub cannot be reached: connect, set HF_HOME to a "
            f"cache that holds it, {otherwise}."
        ) from error
    except (HfHubHTTPError, OSError) as error:
        raise SetupError(f"downloading {HUB_REPOSITORY} failed ({error}); try again, {otherwise}.") from error


def parameter_counts(folder: Path, recipe: Recipe) -> dict[str, int]:
    """Parameters of each component of a checkpoint, from the headers of its safetensors files alone.

    Raises:
        SetupError: a file that is no safetensors file, or cut short.
    """
    counts = {}
    for name in needed_folders(recipe):
        total = sum(_count(path) for path in (folder / name).glob("*.safetensors"))
        if total:
            counts["transformer" if name == recipe.transformer_subfolder else name] = total
    return counts


def _count(path: Path) -> int:
    """Layout: eight bytes of little-endian length, that much json, the tensors it tells the place of."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            size = path.stat().st_size - 8
            header = json.loads(file.read(length)) if 0 < length <= size else None
    except (OSError, ValueError) as error:
        raise SetupError(f"{path} cannot be read ({error}).") from error
    if header is None or _end(header) > size - length:
        raise SetupError(f"{path} is cut short, or a pointer to the file proper (git lfs pull fetches it).")
    return sum(torch.Size(tensor["shape"]).numel() for name, tensor in header.items() if name != "__metadata__")


def _end(header: dict[str, Any]) -> int:
    return max((tensor["data_offsets"][1] for name, tensor in header.items() if name != "__metadata__"), default=0)


def load(source: Source, recipe: Recipe, *, device: torch.device, dtype: torch.dtype, offload: bool = False) -> Parts:
    """Read every component to `device`, or create it there, in `dtype`; with `offload` it then waits on the host."""
    home = torch.device("cpu") if offload else device
    if source.folder is None:
        return _dummy_parts(recipe, device=device, home=home, dtype=dtype)
    return _folder_parts(source.folder, recipe, home=home, dtype=dtype)


def _folder_parts(folder: Path, recipe: Recipe, *, home: torch.device, dtype: torch.dtype) -> Parts:
    from diffusers import LTX2Pipeline, LTX2VideoDiffusionDecoderModel, LTX2VideoTransformer3DModel
    from diffusers.pipelines.ltx2 import LTX2LatentUpsamplerModel

    options: dict[str, Any] = {"dtype": dtype, "use_safetensors": True}
    transformer = LTX2VideoTransformer3DModel.from_pretrained(folder, subfolder=recipe.transformer_subfolder, **options)
    pipeline = LTX2Pipeline.from_pretrained(
        folder, transformer=transformer, duration_head=None, processor=None, prompt_enhancer=None, **options
    )
    if not recipe.distilled:
        pipeline.scheduler = type(pipeline.scheduler).from_config(
            pipeline.scheduler.config, use_dynamic_shifting=True, shift_terminal=0.1
        )
    upsampler = None
    if recipe.stages == 2:
        upsampler = LTX2LatentUpsamplerModel.from_pretrained(folder, subfolder="latent_upsampler", **options).to(home)
    decoder = LTX2VideoDiffusionDecoderModel.from_pretrained(folder, subfolder="diffusion_decoder", **options)
    return Parts(pipeline.to(home), upsampler, decoder.to(home))


def _dummy_parts(recipe: Recipe, *, device: torch.device, home: torch.device, dtype: torch.dtype) -> Parts:
    from diffusers import LTX2Pipeline

    torch.manual_seed(0)
    # Created on the GPU even when it is to wait on the host: 36 B random numbers take a CPU minutes.
    parts: dict[str, Any] = {
        name: build_component(name, component_config(name), device=device, dtype=dtype).to(home)
        for name in COMPONENTS
        if recipe.stages == 2 or name != "latent_upsampler"
    }
    upsampler, decoder = parts.pop("latent_upsampler", None), parts.pop("diffusion_decoder")
    pipeline = LTX2Pipeline(
        scheduler=make_scheduler(full=not recipe.distilled), tokenizer=stand_in_tokenizer(), **parts
    )
    return Parts(pipeline, upsampler, decoder)
