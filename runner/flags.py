"""The flags as data: name, type, default and help of each, and the one place where a given value becomes a typed one.

Names and defaults are those of xfuser's runner where it has the flag (xfuser 0.7.0, config/args.py). A value comes from
the command line as text, from a yaml or json file as its own type; `convert` takes both.
"""

import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from runner.errors import UsageError
from runner.xfuser_flags import UNSUPPORTED, refusal
from runner_models import model_names
from runner_models.ltx2.decoder.options import METHODS

DTYPES = {
    **dict.fromkeys(("fp32", "float32", "float"), "float32"),
    **dict.fromkeys(("bf16", "bfloat16"), "bfloat16"),
    **dict.fromkeys(("fp16", "float16", "half"), "float16"),
}


@dataclass(frozen=True)
class Flag:
    """One flag. `default` None means that the model or the machine decides, or that there is no value.

    `choices` maps each spelling that is allowed to the value it stands for. `several`: the flag takes a list.
    """

    name: str
    kind: Literal["int", "float", "str", "bool"]
    help: str
    default: Any = None
    metavar: str | None = None
    choices: Mapping[str, str] | None = None
    several: bool = False


def _same(*names: str) -> dict[str, str]:
    return {name: name for name in names}


GROUPS: dict[str, tuple[Flag, ...]] = {
    "model": (
        Flag("model", "str", f"{', '.join(model_names())}, a checkpoint folder, or FOLDER:full; required"),
        Flag("task", "str", "t2v (prompt) or i2v (prompt and first frame); required", choices=_same("t2v", "i2v")),
        Flag("revision", "str", "commit or branch of the hub repository (default: its main branch)"),
        Flag(
            "load_format",
            "str",
            "auto reads the checkpoint; dummy builds the released architecture with random weights (default: auto)",
            default="auto",
            choices=_same("auto", "dummy"),
        ),
        Flag(
            "device",
            "str",
            "auto, cpu or cuda (NVIDIA and AMD); auto takes a GPU where there is one (default: auto)",
            default="auto",
            metavar="auto|cpu|cuda",
            choices={**_same("auto", "cpu", "cuda"), "gpu": "cuda"},
        ),
        Flag(
            "dtype",
            "str",
            "fp32, bf16 or fp16 (default: bf16 on a GPU, fp32 on a CPU)",
            default="auto",
            metavar="DTYPE",
            choices={"auto": "auto", **DTYPES},
        ),
    ),
    "prompts and image": (
        Flag("prompt", "str", "what to show; each one makes a video", default=(), several=True, metavar="TEXT"),
        Flag(
            "negative_prompt",
            "str",
            "what to avoid: one for all prompts or as many as prompts; full model only (default: a list of flaws)",
            default=(),
            several=True,
            metavar="TEXT",
        ),
        Flag("dataset_path", "str", "instead of --prompt: a .csv with a column `prompt`, or text, one prompt a line"),
        Flag("input_images", "str", "first frame for i2v: one file or http(s) URL", default=(), several=True),
        Flag("resize_input_images", "bool", "scale and centre-crop the image to --width x --height", default=False),
    ),
    "video": (
        Flag("height", "int", "pixels; multiple of 64 from 256, full model: of 32 from 224 (default: 1024)"),
        Flag("width", "int", "pixels; as --height (default: 1536)"),
        Flag("num_frames", "int", "frames; 8*k+1 from 17: 17, 25, ..., 121, ... (default: 121)"),
        Flag("frame_rate", "float", "frames per second; above 0 (default: 24)"),
    ),
    "sampling": (
        Flag("num_inference_steps", "int", "distilled: 8, fixed; full: 2 or more (default: 8; full: 30)"),
        Flag("guidance_scale", "float", "distilled: 1, fixed; full: 1 (no video CFG) or more (default: 1; full: 3)"),
        Flag("max_sequence_length", "int", "prompt tokens; multiple of 128 (default: 1024)"),
        Flag("seed", "int", "0 to 2**63-1; every prompt starts from it (default: 42)", default=42),
    ),
    "parallel and speed": (
        Flag("ulysses_degree", "int", "ranks that share the attention heads; 1 or more (default: 1)", default=1),
        Flag("ring_degree", "int", "ranks that pass keys in a ring; 1 or more (default: 1)", default=1),
        Flag("data_parallel_degree", "int", "replicas that share the prompts; 1 or more (default: 1)", default=1),
        Flag("attention_backend", "str", "video self-attention kernel, by xfuser's names (default: torch's choice)"),
        Flag("use_torch_compile", "bool", "compile the transformer blocks", default=False),
        Flag("enable_model_cpu_offload", "bool", "keep models on the host while they do not run", default=False),
    ),
    "video decode": (
        Flag(
            "decoder_attention",
            "str",
            "video decoder's kernel: the first usable (auto), by measurement (fastest), or named (default: auto)",
            default="auto",
            choices=_same("auto", "fastest", "natten", "aiter", "triton", "sdpa"),
        ),
        Flag("use_parallel_vae", "bool", "spread the video decode over the ranks of a video", default=False),
        Flag("enable_tiling", "bool", "decode in chunks of what memory is free, with the same result", default=False),
        Flag("decode_chunk_frames", "int", "decode in chunks of this many frames; a multiple of 8"),
        Flag(
            "vae_decode",
            "str",
            "exact; tiled (the stock overlapping tiles, blended); conv (the autoencoder's decoder) (default: exact)",
            default="exact",
            choices=_same(*METHODS),
        ),
    ),
    "run and output": (
        Flag("num_iterations", "int", "timed runs, the last is saved; 1 or more (default: 1)", default=1),
        Flag("warmup_calls", "int", "runs before the timed ones; 0 or more (default: 0)", default=0),
        Flag(
            "profile",
            "bool",
            "trace the last request of each rank: profile_trace_rank_N.json.gz in --output_directory",
            default=False,
        ),
        Flag("output_directory", "str", "folder for videos and metrics.json, created (default: .)", default="."),
        Flag("dry_run", "bool", "print sizes, tokens, stages and memory; load nothing", default=False),
    ),
}

NOT_IN_FILES = ("config", "from_json", "doctor", "json", "help", "version")

FLAGS: dict[str, Flag] = {flag.name: flag for flags in GROUPS.values() for flag in flags}


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The closest known word, or None when nothing is close."""
    near = difflib.get_close_matches(word.lower(), list(known), n=1, cutoff=0.6)
    return near[0] if near else None


def unknown(name: str, *, where: str = "") -> UsageError:
    """The error for a flag nobody knows, with the nearest one that exists."""
    near = nearest(name, (*FLAGS, *NOT_IN_FILES))
    hint = f"did you mean --{near}?" if near else "see --help."
    return UsageError(f"--{name}{where} is not a flag; {hint}")


def convert(flag: Flag, value: object, *, where: str = "") -> Any:
    """Give `value` the flag's type.

    Args:
        flag: whose value it is.
        value: text or a list of texts from the command line, or any yaml or json value.
        where: " in FILE", for the message.

    Raises:
        UsageError: another type, or none of the flag's choices.
    """
    if flag.several:
        items = value if isinstance(value, (list, tuple)) else (value,)
        return tuple(_convert_one(flag, item, where) for item in items)
    return _convert_one(flag, value, where)


def _convert_one(flag: Flag, value: object, where: str) -> Any:
    name = f"--{flag.name} {value}{where}"
    if flag.kind == "bool":
        if not isinstance(value, bool):
            raise UsageError(f"{name} is not true or false.")
        return value
    if flag.kind == "int":
        # 30 digits: far past every limit, and short of the length at which int() itself refuses.
        if isinstance(value, str) and not where and re.fullmatch(r"[+-]?[0-9]{1,30}", value):
            return int(value)
        if not isinstance(value, int) or isinstance(value, bool):
            raise UsageError(f"{name} is not an integer.")
        return value
    if flag.kind == "float":
        if isinstance(value, bool) or (isinstance(value, str) and where):
            raise UsageError(f"{name} is not a number.")
        try:
            return float(value)  # type: ignore[arg-type]  # a list or a mapping raises TypeError
        except (TypeError, ValueError, OverflowError) as error:
            raise UsageError(f"{name} is not a number.") from error
    if not isinstance(value, str):
        raise UsageError(f"{name} is not text; put it in quotes.")
    if "\0" in value or any("\ud800" <= letter <= "\udfff" for letter in value):
        raise UsageError(f"--{flag.name}{where} holds bytes that are no UTF-8 text; retype it.")
    if flag.choices is not None and value not in flag.choices:
        near = nearest(value, flag.choices)
        hint = f"did you mean {near}? " if near else ""
        raise UsageError(f"{name} is not known; {hint}allowed: {', '.join(flag.choices)}.")
    return flag.choices[value] if flag.choices is not None else value


def read_values(given: Mapping[Any, Any], *, where: str) -> dict[str, Any]:
    """Typed values of a file's flags; '-' and '_' are alike, null means not given.

    Raises:
        UsageError: an unknown name (with the nearest), an xfuser flag that is not supported, or a wrong type.
    """
    values = {}
    for key, value in given.items():
        name = str(key).replace("-", "_")
        if value is None:
            continue
        if name in UNSUPPORTED:
            advice = refusal(name, [str(value)])
            if advice and value is not False:
                raise UsageError(f"{advice.removesuffix('.')}{where}.")
            continue
        if name in NOT_IN_FILES:
            raise UsageError(f"--{name}{where} cannot stand in a file; give it on the command line.")
        if name not in FLAGS:
            raise unknown(name, where=where)
        if name in values:
            raise UsageError(f"--{name}{where} is given twice, once with '-' and once with '_'.")
        values[name] = convert(FLAGS[name], value, where=where)
    return values
