"""Compile kernel launches for GPUs that are not here, as a launch would, and read facts out of the machine code.

Runs in a process of its own, where Triton is not interpreted: see conftest.py.
"""

import math
import re
import subprocess
import tempfile
from pathlib import Path

import torch

TARGETS = {
    "gfx942": ("hip", "gfx942", 64),
    "gfx950": ("hip", "gfx950", 64),
    "sm80": ("cuda", 80, 32),
    "sm90": ("cuda", 90, 32),
    "sm100": ("cuda", 100, 32),
}
POINTERS = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.int32: "*i32",
    torch.uint8: "*u8",
}
SHARED_LIMIT = {"gfx942": 64 << 10, "gfx950": 160 << 10, "sm80": 163 << 10, "sm90": 227 << 10, "sm100": 227 << 10}


class Recorder:
    """Stands in for a kernel and keeps what it would have been launched with."""

    def __init__(self, kernel, launches):
        self.kernel, self.launches = kernel, launches

    def __getitem__(self, grid):
        return lambda *args, **options: self.launches.append((self.kernel, args, options))


def compile_launch(arch: str, launch):
    import triton
    from triton.backends.compiler import GPUTarget

    source, options = source_of(launch)
    return triton.compile(source, target=GPUTarget(*TARGETS[arch]), options=options)


def source_of(launch):
    """The launch as a source for the compiler, specialised as the JIT would."""
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction

    kernel, args, options = launch
    named = {name: options[name] for name in kernel.arg_names if name in options}
    args = (*args, *(named[name] for name in kernel.arg_names[len(args) :]))
    options = {name: value for name, value in options.items() if name not in named}
    unspecialized = {kernel.arg_names[i] for i, p in enumerate(kernel.params) if p.do_not_specialize}
    constants = {p.name for p in kernel.params if p.is_constexpr}
    signature, constexprs, attrs = {}, {}, {}

    def describe(value, path: tuple[int, ...], special: bool):
        if isinstance(value, tuple):
            return tuple(describe(x, (*path, i), special) for i, x in enumerate(value))
        if isinstance(value, torch.Tensor):
            attrs[path] = [["tt.divisibility", 16]]
            return POINTERS[value.dtype]
        if hasattr(value, "block_shape"):  # a TensorDescriptor
            return f"tensordesc<{POINTERS[value.base.dtype][1:]}{list(value.block_shape)}>"
        if isinstance(value, float):
            return "fp32"
        if special and value == 1:
            constexprs[path] = 1
            return "constexpr"
        if special and value % 16 == 0:
            attrs[path] = [["tt.divisibility", 16]]
        return "i32" if -(2**31) <= value < 2**31 else "i64"

    for i, (name, value) in enumerate(zip(kernel.arg_names, args, strict=True)):
        if name in constants:
            signature[name], constexprs[(i,)] = "constexpr", value
        else:
            signature[name] = describe(value, (i,), name not in unspecialized)
    make = GluonASTSource if isinstance(kernel, GluonJITFunction) else ASTSource
    return make(kernel, signature, constexprs, attrs), options


def facts_of(arch: str, launch) -> dict:
    """Of one launch, compiled.

    name, shared (bytes), registers, stack_bytes, spills (per multiplying loop; AMD: of the kernel), wide_loads (16
    bytes), narrow_loads (2 bytes), bulk_loads (TMA; NVIDIA), wide_stores (16 bytes), narrow_stores (1 or 2 bytes),
    matrix (instructions), flops_per_warp (of each multiplying loop), alias.
    """
    binary = compile_launch(arch, launch)
    read = _amd_facts if TARGETS[arch][0] == "hip" else _nvidia_facts
    return {"name": binary.metadata.name, "shared": binary.metadata.shared, **read(binary)}


def _innermost_loops(lines: list[str], label: str, branch: str) -> list[list[str]]:
    places: dict[str, int] = {}
    spans = []
    for i, line in enumerate(lines):
        if found := re.match(label, line):
            places[found.group(1)] = i
        elif (found := re.search(branch, line)) and found.group(1) in places:
            spans.append((places[found.group(1)], i))
    inner = [s for s in spans if not any(o != s and s[0] <= o[0] and o[1] <= s[1] for o in spans)]
    return [lines[a : b + 1] for a, b in inner]


def _loop_flops(loops: list[list[str]], instruction: str) -> list[float]:
    """FLOPs per warp of each loop that multiplies matrices; `instruction` captures M, N and K."""
    shapes = [[m.groups() for line in loop if (m := re.search(instruction, line))] for loop in loops]
    return [2.0 * sum(math.prod(map(int, shape)) for shape in found) for found in shapes if found]


def _amd_facts(binary) -> dict:
    text = binary.asm["amdgcn"]
    loops = _innermost_loops(text.splitlines(), r"(\.LBB\w+):", r"s_c?branch\w*\s+(\.LBB\w+)")
    return {
        "spills": [int(re.search(r"\.vgpr_spill_count:\s*(\d+)", text).group(1))],
        "stack_bytes": int(re.search(r"\.private_segment_fixed_size:\s*(\d+)", text).group(1)),
        "matrix": sorted(set(re.findall(r"v_mfma_\w+", text))),
        "registers": int(re.search(r"\.vgpr_count:\s*(\d+)", text).group(1)),
        "wide_loads": len(re.findall(r"(?:buffer|global)_load_(?:lds_)?dwordx4", text)),
        "narrow_loads": len(re.findall(r"(?:buffer|global)_load_(?:ushort|short|ubyte)", text)),
        "bulk_loads": 0,
        "wide_stores": len(re.findall(r"(?:buffer|global)_store_dwordx4", text)),
        "narrow_stores": len(re.findall(r"(?:buffer|global)_store_(?:short|byte)", text)),
        "flops_per_warp": _loop_flops(loops, r"v_mfma_f32_(\d+)x(\d+)x(\d+)_?bf16"),
        "alias": [],
    }


def _tool(name: str, *args: str) -> str:
    import triton

    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    return subprocess.run([path, *args], check=True, capture_output=True, text=True).stdout


def _nvidia_facts(binary) -> dict:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary.asm["cubin"])
        file.flush()
        resources = _tool("cuobjdump", "-res-usage", file.name)
        text = _tool("cuobjdump", "-sass", file.name)
    addressed = [line for line in text.splitlines() if re.match(r"\s+/\*[0-9a-f]{4,5}\*/", line)]
    position = {re.search(r"/\*([0-9a-f]+)\*/", line).group(1).lstrip("0"): i for i, line in enumerate(addressed)}
    spans = []
    for i, line in enumerate(addressed):
        found = re.search(r"\bBRA(?:\.\w+)*\s+(?:!?U?P\d+,\s*)?0x([0-9a-f]+)", line)
        target = position.get(found.group(1).lstrip("0"), i + 1) if found else i + 1
        if target < i:
            spans.append((target, i))
    inner = [s for s in spans if not any(o != s and s[0] <= o[0] and o[1] <= s[1] for o in spans)]
    loops = [addressed[a : b + 1] for a, b in inner]
    # A wgmma is 64 rows of a warpgroup: a quarter of it per warp.
    wgmma = [flops / 4 for flops in _loop_flops(loops, r"HGMMA\.(\d+)x(\d+)x(\d+)")]
    mma = _loop_flops(loops, r"HMMA\.(\d\d)(\d)(\d\d)\.F32\.BF16")
    matrix_loops = [loop for loop in loops if any("MMA" in line for line in loop)]
    return {
        "spills": [sum(bool(re.search(r"\b(?:STL|LDL)\b", line)) for line in loop) for loop in matrix_loops],
        "stack_bytes": int(re.search(r"STACK:(\d+)", resources).group(1)),
        "registers": int(re.search(r"REG:(\d+)", resources).group(1)),
        "wide_loads": len(re.findall(r"LDG(?:STS)?\.E(?:\.\w+)*\.128", text)),
        "narrow_loads": len(re.findall(r"LDG\.E\.U16", text)),
        "bulk_loads": len(re.findall(r"\bUTMALDG\b", text)),
        "wide_stores": len(re.findall(r"STG\.E(?:\.\w+)*\.128", text)),
        "narrow_stores": len(re.findall(r"STG\.E\.U(?:8|16)", text)),
        "flops_per_warp": wgmma or mma,
        "matrix": sorted(set(re.findall(r"\b(HGMMA|HMMA|UTCHMMA|UTCMMA)\b", text))),
        "alias": [bad for loop in loops for bad in aliased_operands(loop)],
    }


def _written(line: str) -> set[int]:
    """Vector registers that one SASS instruction writes."""
    body = re.sub(r"^\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P\d+\s+)?", "", line)
    found = re.match(r"(\S+)\s+R(\d+)\b", body)
    if not found or found.group(1).startswith(("ST", "BAR", "BRA", "LDGSTS", "RED")):
        return set()
    op, first = found.group(1), int(found.group(2))
    width = 2 if ".64" in op or op.startswith(("CS2R", "IMAD.WIDE")) else 1
    if shape := re.match(r"HGMMA\.64x(\d+)x", op):
        width = int(shape.group(1)) // 2
    elif ".128" in op or ".M88.4" in op:
        width = 4
    return set(range(first, first + width))


def aliased_operands(loop: list[str]) -> list[str]:
    """wgmmas whose register operand A enters the loop from outside and is overwritten in it (ptxas 12.8 to 13.0)."""
    written = [_written(line) for line in loop]
    bad = []
    for i, line in enumerate(loop):
        found = re.search(r"HGMMA\S*\s+R\d+,\s+R(\d+),", line)
        if not found:
            continue
        operand = set(range(int(found.group(1)), int(found.group(1)) + 4))
        before = set().union(*written[:i])
        after = set().union(*written[i:])
        if (operand - before) & after:
            bad.append(line.strip())
    return bad
