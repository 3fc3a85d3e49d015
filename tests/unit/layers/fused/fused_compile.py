"""The launches of every fused op, compiled for GPUs that are not here: see triton_compile.py."""

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from unittest import mock

import torch
from triton_compile import Recorder, facts_of, source_of

from layers.fused import heads, launch, narrow, pixels, tokens
from layers.fused.launch import Blocks

GRID, HEAD_DIM = (4, 32, 48), 64


@contextlib.contextmanager
def recorded(blocks: Blocks) -> Iterator[list]:
    """Keeps what the kernels would be launched with, instead of running them."""
    launches: list = []
    kernels = tuple(_Module(module, launches) for module in launch.kernels())
    with contextlib.ExitStack() as stack:
        for module in (heads, narrow, pixels, tokens):
            stack.enter_context(mock.patch.object(module, "kernels", return_value=kernels))
            if hasattr(module, "runs_kernels"):
                stack.enter_context(mock.patch.object(module, "runs_kernels", return_value=True))
        stack.enter_context(mock.patch.object(narrow, "blocks", return_value=blocks))
        yield launches


class _Module(SimpleNamespace):
    """A kernel module whose kernels are recorders."""

    def __init__(self, module, launches):
        super().__init__(**{name: Recorder(x, launches) for name, x in vars(module).items() if name.endswith("kernel")})


def launches_of(arch: str, op: str, channels: int, *, blocks: Blocks | None = None, grid=GRID) -> list:
    """What one call of the op launches on bf16 tensors of this grid (T, H, W), K and V in larger buffers."""
    x = _empty(1, *grid, channels)
    hidden, units = 4 * channels, 3 * channels
    pending = _empty(channels, dtype=torch.float32)
    norms = heads.HeadNorms(_empty(2, HEAD_DIM, dtype=torch.float32), 1e-6)
    table = _empty(2, 500, HEAD_DIM // 2, dtype=torch.float32)
    rotary = heads.Rotary(table, (8, 12, 12), (3 * grid[0], 200, 300))
    q = _empty(1, *grid, channels // HEAD_DIM, HEAD_DIM)
    wide = _empty(1, grid[0], grid[1] + 6, *q.shape[3:])
    out = (q, wide[:, :, 3:-3], wide[:, :, 3:-3])
    with recorded(blocks or launch.BLOCKS[arch]) as launches:
        if op == "norm":
            fold = {"scale": _empty(1, 1, 1, 1, channels), "shift": _empty(1, 1, 1, 1, channels)}
            tokens.add_rms_norm_(x, _empty(*x.shape), _empty(channels), eps=1e-6, **fold)
            tokens.rms_norm(x, _empty(channels), eps=1e-6)
        elif op == "silu":
            tokens.silu_mul_(x, _empty(*x.shape))
        elif op == "heads":
            heads.norm_rotate_heads(_empty(1, *grid, units), norms, rotary, out=out)
        elif op == "bytes":
            pixels.patches_to_bytes(_empty(1, *grid, 48), 4)
        elif op == "qkv":
            narrow.project_heads(x, pending, _folded(units, channels), norms, rotary, eps=1e-6, out=out)
        elif op == "mlp":
            gate = _folded(hidden, channels)
            narrow.gated_mlp_(x, pending, narrow.pack_mlp(gate, gate, _empty(channels, hidden)), eps=1e-6)
    # A meta tensor is on no NVIDIA GPU.
    return [(k, a, {**o, **({"PTX": arch.startswith("sm")} if "PTX" in o else {})}) for k, a, o in launches]


def _empty(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device="meta")


def _folded(units: int, channels: int) -> narrow.FoldedLinear:
    vectors = [_empty(units, dtype=torch.float32) for _ in range(2)]
    return narrow.FoldedLinear(_empty(units, channels), *vectors)


def compile_facts(arch: str, op: str, channels: int, **call) -> list[dict]:
    """The facts of each launch of the call, with flops_per_block of each loop that multiplies."""
    facts = []
    for found in launches_of(arch, op, channels, **call):
        fact = facts_of(arch, found)
        fact["flops_per_block"] = [flops * found[2]["num_warps"] for flops in fact.pop("flops_per_warp")]
        facts.append(fact)
    return facts


def specializations(op: str, grid: tuple[int, int, int]) -> list[str]:
    """What the JIT compiles apart for a call on this grid: the specialised arguments and constants of each launch."""
    found = []
    for each in launches_of("sm80", op, 256, grid=grid):
        source, options = source_of(each)
        found.append(str((source.signature, source.constants, sorted(map(str, source.attrs.items())), options)))
    return found
