"""Keep the torch and triton that a base image brings: a PyPI triton over that of a ROCm image breaks both.

image_packages.py write FILE      a pip constraint for each such package that is installed, and what they report
image_packages.py check FILE      end with 1 unless they are the same, and import together
image_packages.py folder PATH     where an installed package keeps PATH, e.g. aiter/jit; nothing where there is none
"""

import importlib.util
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PACKAGES = (
    *("torch", "torchvision", "torchaudio", "apex"),
    # The names under which triton is packaged; two of them overwrite each other's files.
    *("triton", "pytorch-triton", "pytorch-triton-rocm", "triton-rocm", "amd-triton"),
)


def constraints() -> list[str]:
    """`name==version` of each of PACKAGES that is installed."""
    found = []
    for name in PACKAGES:
        try:
            found.append(f"{name}=={version(name)}")
        except PackageNotFoundError:
            continue
    return found


def reported() -> list[str]:
    """What torch and triton say of themselves, imported together, as comments of the constraints file."""
    import torch
    import triton

    return [
        f"# torch {torch.__version__}, hip {torch.version.hip}, cuda {torch.version.cuda}",
        f"# triton {triton.__version__}",
    ]


def main(command: str, argument: str) -> int:
    """The exit code."""
    if command == "folder":
        package, _, rest = argument.partition("/")
        spec = importlib.util.find_spec(package)
        for place in (spec.submodule_search_locations or ()) if spec else ():
            if (Path(place) / rest).is_dir():
                print(Path(place) / rest)
        return 0
    now = [*reported(), *constraints()]
    path = Path(argument)
    if command == "write":
        path.write_text("\n".join(now) + "\n")
        print(path.read_text(), end="")
        return 0
    before = path.read_text().splitlines()
    for line in (
        *(f"- {line}" for line in before if line not in now),
        *(f"+ {line}" for line in now if line not in before),
    ):
        print(line, file=sys.stderr)
    if now != before:
        print("the image's torch or triton was replaced: see the lines above", file=sys.stderr)
    return int(now != before)


if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[1] not in ("write", "check", "folder"):
        sys.exit(__doc__)
    sys.exit(main(*sys.argv[1:]))
