"""The command line: flags grouped for --help, files of flags, prompts from a file; gives a RunConfig.

Precedence: a flag on the command line, then --config, then --from_json, then the model's default.
"""

import argparse
import json
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import yaml

from runner import __version__
from runner.config import RunConfig
from runner.errors import UsageError, user_path
from runner.flags import FLAGS, GROUPS, Flag, convert, read_values, unknown
from runner.prompts import read_prompts
from runner.xfuser_flags import UNSUPPORTED, refusal

PROG = "python -m runner"
USAGE = f"{PROG} --model MODEL --task t2v|i2v --prompt TEXT [flags]\n       torchrun --nproc_per_node=N -m runner ..."
EPILOG = (
    "'-' and '_' are alike in flag names. --no_FLAG turns off what a file turned on. Exit codes: 0 done, 2 bad usage, "
    "1 failure; --doctor: 0 the run would work here, 1 it would not."
)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """argparse's own complaints, e.g. `argument --seed: expected one argument`, in the style of all others."""
        raise UsageError(f"{message.removeprefix('argument ')}; see --help.")


def build_parser() -> argparse.ArgumentParser:
    """The parser. It keeps values as text, for `runner.flags.convert`, and leaves out what is not given."""
    parser = _Parser(
        prog=PROG,
        usage=USAGE,
        description="Make LTX-2.5 videos with sound from prompts, or from a prompt and a first frame.",
        epilog=EPILOG,
        allow_abbrev=False,
        add_help=False,
        argument_default=argparse.SUPPRESS,
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=34),
    )
    for title, flags in GROUPS.items():
        group = parser.add_argument_group(title)
        for flag in flags:
            _add(group, flag)
    files = parser.add_argument_group("files of flags and information")
    files.add_argument("--config", metavar="FILE", help="yaml with any of these flags; the command line wins")
    files.add_argument("--from_json", metavar="FILE", help="the .json beside a video: make it again; other flags win")
    files.add_argument("--doctor", action="store_true", help="say whether this run would work here, and why not")
    files.add_argument("--json", action="store_true", help="with --doctor: as one json object")
    files.add_argument("-h", "--help", action="help", help="show this and exit")
    files.add_argument("--version", action="version", version=__version__, help="print the version and exit")
    for name in UNSUPPORTED:
        parser.add_argument(f"--{name}", nargs="*", help=argparse.SUPPRESS)
    return parser


def _add(group: Any, flag: Flag) -> None:
    option = f"--{flag.name}"
    if flag.kind == "bool":
        group.add_argument(option, action="store_true", help=flag.help)
        group.add_argument(f"--no_{flag.name}", dest=flag.name, action="store_false", help=argparse.SUPPRESS)
        return
    default_metavar = "N" if flag.kind in ("int", "float") else flag.name.rpartition("_")[2].upper()
    metavar = flag.metavar or ("|".join(flag.choices) if flag.choices else default_metavar)
    if flag.several:
        # xfuser keeps the last of `--prompt A --prompt B`; losing A silently helps nobody.
        group.add_argument(option, nargs="*", action="extend", metavar=metavar, help=flag.help)
    else:
        group.add_argument(option, metavar=metavar, help=flag.help)


@dataclass(frozen=True)
class CommandLine:
    """Typed values by flag name, files of flags merged in; and whether the doctor is asked, and for json."""

    values: dict[str, Any]
    doctor: bool
    json: bool


def parse(argv: Sequence[str] | None = None) -> RunConfig:
    """Read a command line into a RunConfig; what `read` says of its argument and errors holds here."""
    return RunConfig.from_values(read(argv).values)


def read(argv: Sequence[str] | None = None) -> CommandLine:
    """Read a command line (default: this process's). Imports neither torch nor diffusers.

    Raises:
        UsageError: a flag, a file of flags or the prompts cannot be used. What depends on the machine or on other flags
            is left to `runner.checks.check`.
        SystemExit: after --help and --version.
    """
    arguments = [_underscores(argument) for argument in (sys.argv[1:] if argv is None else argv)]
    namespace, extras = build_parser().parse_known_args(arguments)
    given = vars(namespace)
    doctor, as_json = given.pop("doctor", False), given.pop("json", False)
    if as_json and not doctor:
        raise UsageError("--json belongs to --doctor; the figures of a run are in its metrics.json.")
    if extras:
        raise _unexpected(extras)
    for name in UNSUPPORTED:
        advice = refusal(name, given.pop(name)) if name in given else None
        if advice:
            raise UsageError(advice)
    config_file, sidecar = given.pop("config", None), given.pop("from_json", None)
    layers = [
        {} if sidecar is None else _from_sidecar(sidecar),
        {} if config_file is None else _from_yaml(config_file),
        {name: convert(FLAGS[name], value) for name, value in given.items()},
    ]
    values: dict[str, Any] = {}
    for layer in layers:
        values = _merge(values, layer)
    dataset = values.pop("dataset_path", None)
    if dataset is not None:
        values["prompt"] = read_prompts(dataset)
    return CommandLine(values, doctor, as_json)


def _underscores(argument: str) -> str:
    """`--num-frames=9` -> `--num_frames=9`; values and prompts stay as they are."""
    match = re.fullmatch(r"(--[A-Za-z0-9_-]+)(=.*)?", argument, re.DOTALL)
    if not match:
        return argument
    return f"--{match[1][2:].replace('-', '_')}{match[2] or ''}"


def _unexpected(extras: list[str]) -> UsageError:
    flag = next((extra for extra in extras if extra.startswith("--") and extra != "--"), None)
    if flag is not None:
        return unknown(flag[2:].partition("=")[0])
    return UsageError(f"{extras[0]} belongs to no flag; flags start with --, and a prompt goes in quotes.")


def _merge(lower: dict[str, Any], upper: dict[str, Any]) -> dict[str, Any]:
    """`upper` wins; prompts given as text and as a file stand for each other."""
    if "prompt" in upper and "dataset_path" in upper:
        raise UsageError("--prompt and --dataset_path are both given; give one of them.")
    if "prompt" in upper or "dataset_path" in upper:
        lower = {name: value for name, value in lower.items() if name not in ("prompt", "dataset_path")}
    return {**lower, **upper}


def _from_yaml(path: str) -> dict[str, Any]:
    return read_values(_mapping(f"--config {path}", path, yaml.safe_load), where=f" in {path}")


def _from_sidecar(path: str) -> dict[str, Any]:
    name = f"--from_json {path}"
    config = _mapping(name, path, json.loads).get("config")
    if not isinstance(config, dict):
        raise UsageError(f'{name} has no "config"; give the .json that lies beside a video.')
    return read_values(config, where=f" in {path}")


def _mapping(name: str, path: str, load: Callable[[str], Any]) -> dict[Any, Any]:
    try:
        content = load(user_path(path, name).read_bytes().decode("utf-8-sig"))
    except FileNotFoundError as error:
        raise UsageError(f"{name} does not exist.") from error
    except OSError as error:
        raise UsageError(f"{name} cannot be read: {error.strerror}.") from error
    except UsageError:
        raise
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        raise UsageError(f"{name} is damaged: {' '.join(str(error).split())}.") from error
    if not isinstance(content, dict):
        raise UsageError(f"{name} holds no flags; write one a line, as in `num_frames: 121`.")
    return content
