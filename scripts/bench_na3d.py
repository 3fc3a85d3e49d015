"""Benchmark of 3-D neighborhood attention: verify every variant, then time all of them interleaved in one run.

    python scripts/bench_na3d.py --out benchmarks/na3d_h200.json
    python scripts/bench_na3d.py --plot benchmarks/na3d_h200.json      (no GPU needed; writes an .svg beside the json)

Variants: ours (row, tile, tile with a softmax bound, on Hopper also the Triton tile kernel), tiled SDPA, and NATTEN,
comfy-kitchen and AITER where installed; on contiguous inputs and on the views of a fused QKV projection (a variant that
must copy them first is timed with its copies). Useful FLOPs are 4 * head_dim * batch * T * H * W * heads *
prod(kernel). The ceiling is dense cuDNN SDPA at head_dim 64. The last line of stdout is one JSON object.
"""

import argparse
import dataclasses
import importlib.util
import json
import math
import random
import statistics
import sys
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path

import torch
import torch.nn.functional as F
from arguments import number, output_file, seconds
from torch.nn.attention import SDPBackend, sdpa_kernel

sys.path.insert(0, str(Path(__file__).parent.parent))
from layers.neighborhood_attention import configs, na3d_flash_attn, neighborhood_attention_sdpa
from layers.neighborhood_attention.race import device_milliseconds

# (T, H, W, heads), kernel: shapes for which other projects published times, then the largest decoder stage.
SHAPES = [
    ((18, 32, 48, 32), (3, 7, 7)),
    ((36, 64, 96, 8), (3, 5, 5)),
    ((40, 96, 96, 8), (3, 5, 5)),
    ((16, 80, 32, 4), (11, 11, 11)),
    ((40, 96, 96, 4), (11, 11, 11)),
    ((79, 192, 192, 4), (11, 11, 11)),
    ((4, 8, 128, 4), (3, 5, 27)),
    ((121, 384, 256, 4), (11, 11, 11)),
]
HEAD_DIM = 64
BOUND = 8.2  # RMS-normed q and k: sqrt(64), and the rounding of bf16


def make_qkv(grid: tuple[int, ...]) -> tuple[torch.Tensor, ...]:
    """Views of a fused projection (1, T, H, W, 3, heads, head_dim): q and k RMS-normed, q scaled."""
    t, h, w, heads = grid
    qkv = torch.empty(1, t, h, w, 3, heads, HEAD_DIM, dtype=torch.bfloat16, device="cuda")
    for plane in range(t):
        x = torch.randn(h, w, 3, heads, HEAD_DIM, device="cuda")
        x[:, :, :2] *= x[:, :, :2].square().mean(-1, keepdim=True).rsqrt()
        x[:, :, 0] *= HEAD_DIM**-0.5
        qkv[0, plane] = x
    return qkv.unbind(4)


def error_of(out: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kernel: tuple[int, ...]) -> float:
    """Relative L2 to tiled SDPA in fp32, on up to 8 corner blocks of queries (at most 12 cells an axis)."""
    grid = q.shape[1:4]
    squares = torch.zeros(2, dtype=torch.float64)
    for corner in range(8):
        own, keys, q_start, kv_start = [slice(None)], [slice(None)], [], []
        for i, (length, size) in enumerate(zip(grid, kernel, strict=True)):
            count = min(length, 12)
            first = length - count if corner >> i & 1 else 0
            begin = min(max(first - size // 2, 0), length - size)
            end = min(max(first + count - 1 - size // 2, 0), length - size) + size
            own.append(slice(first, first + count))
            keys.append(slice(begin, end))
            q_start.append(first)
            kv_start.append(begin)
        expected = neighborhood_attention_sdpa(
            *(x[tuple(s)].float() for x, s in ((q, own), (k, keys), (v, keys))),
            kernel, q_start=q_start, kv_start=kv_start, grid=grid,
        )  # fmt: skip
        difference = out[tuple(own)].float() - expected
        squares += torch.tensor([difference.square().sum().item(), expected.square().sum().item()])
    return math.sqrt(squares[0] / squares[1])


def variants_of(kernel: tuple[int, int, int]) -> dict[str, Callable[..., torch.Tensor]]:
    """Name -> function of (q, k, v)."""
    arch = configs.load(configs.arch_of(torch.device("cuda", 0)))
    row, tile = arch.row(kernel, HEAD_DIM), arch.tile(kernel, HEAD_DIM)
    found: dict[str, Callable[..., torch.Tensor]] = {
        "row": lambda q, k, v: na3d_flash_attn(q, k, v, kernel, config=row),
        "tile": lambda q, k, v: na3d_flash_attn(q, k, v, kernel, config=tile),
        "tile_bound": lambda q, k, v: na3d_flash_attn(q, k, v, kernel, config=tile, softmax_bound=BOUND),
        "sdpa": lambda q, k, v: neighborhood_attention_sdpa(q, k, v, kernel),
    }
    if tile.walk:
        portable = dataclasses.replace(tile, walk="")
        found["tile_portable"] = lambda q, k, v: na3d_flash_attn(q, k, v, kernel, config=portable)
    if importlib.util.find_spec("natten"):
        from natten.functional import na3d

        found["natten"] = lambda q, k, v: na3d(*(x.contiguous() for x in (q, k, v)), kernel_size=kernel, scale=1.0)
    if importlib.util.find_spec("comfy_kitchen"):  # takes any strides; which of its kernels runs is its own choice
        from comfy_kitchen import na3d as comfy_na3d

        found["comfy-kitchen"] = lambda q, k, v: comfy_na3d(q, k, v, list(kernel), scale=1.0)
    if importlib.util.find_spec("aiter"):
        from aiter.ops.triton.attention.na3d_flash import na3d_flash_attn as aiter_na3d

        found["aiter"] = lambda q, k, v: aiter_na3d(*(x.contiguous() for x in (q, k, v)), kernel)
    return found


def dense_ceiling() -> tuple[Callable[[], torch.Tensor], float]:
    """A dense cuDNN SDPA call and its FLOPs; about 20 ms, so that the power limit holds it as it holds us."""
    length, heads = 32768, 16
    q, k, v = (torch.randn(2, heads, length, HEAD_DIM, dtype=torch.bfloat16, device="cuda") for _ in range(3))

    def call() -> torch.Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return F.scaled_dot_product_attention(q, k, v)

    return call, 4.0 * HEAD_DIM * 2 * heads * length**2


def interleaved(calls: dict[str, Callable[[], torch.Tensor]], seconds: float) -> dict[str, list[float]]:
    """Milliseconds of each call over rounds that run every call once, for about `seconds`, 3 rounds at least."""
    for call in calls.values():
        call()
        call()
    torch.cuda.synchronize()
    times: dict[str, list[float]] = {name: [] for name in calls}
    begin, rounds, order = time.monotonic(), 0, random.Random(0)
    while rounds < 3 or (time.monotonic() - begin < seconds and rounds < 50):
        for name in order.sample(list(calls), len(calls)):
            calls[name]()
            times[name].append(device_milliseconds(calls[name]))
        rounds += 1
    return times


def measure(grid: tuple[int, ...], kernel: tuple[int, int, int], seconds: float, limit: float) -> list[dict]:
    """One record per variant and layout; a variant whose error passes `limit` is not timed."""
    views = make_qkv(grid)
    layouts = {"views": views, "contiguous": tuple(x.contiguous() for x in views)}
    dense, dense_flops = dense_ceiling()
    calls: dict[str, Callable[[], torch.Tensor]] = {"dense": dense}
    errors: dict[str, float] = {}
    for layout, qkv in layouts.items():
        for name, function in variants_of(kernel).items():
            if name == "sdpa" and layout == "contiguous" and math.prod(grid) > 4e7:
                continue  # the same copies as on views, and seconds per call
            errors[f"{name}/{layout}"] = error = error_of(function(*qkv), *qkv, kernel)
            if error <= limit:
                calls[f"{name}/{layout}"] = lambda function=function, qkv=qkv: function(*qkv)
            else:
                print(f"WRONG, not timed: {name}/{layout} at {grid} {kernel}: relative L2 {error:.2e}", flush=True)
    times = interleaved(calls, seconds)
    medians = {name: statistics.median(values) for name, values in times.items()}
    useful = 4.0 * HEAD_DIM * math.prod(grid) * math.prod(kernel)
    dense_tflops = dense_flops / medians["dense"] / 1e9
    records = []
    for name, error in errors.items():
        if name not in medians:
            records.append({"grid": grid, "kernel": kernel, "variant": name, "relative_l2": error, "ms": None})
            continue
        ms, layout = medians[name], name.split("/")[1]
        reference = medians.get(f"sdpa/{layout}", medians.get("sdpa/views", math.nan))
        records.append(
            {
                "grid": grid,
                "kernel": kernel,
                "variant": name,
                "ms": ms,
                "ms_min_max": [min(times[name]), max(times[name])],
                "useful_tflops": useful / ms / 1e9,
                "tb_per_s": 4 * 2 * HEAD_DIM * math.prod(grid) / ms / 1e9,
                "of_dense_cudnn": useful / ms / 1e9 / dense_tflops,
                "speedup_over_sdpa": reference / ms,
                "speedup_over_row": medians.get(f"row/{layout}", math.nan) / ms,
                "relative_l2": error,
            }
        )
        print_row(records[-1])
    print(f"    dense cuDNN SDPA: {dense_tflops:.0f} TFLOP/s", flush=True)
    return records


def print_row(r: dict) -> None:
    what = (
        f"{'x'.join(map(str, r['grid'])):>15} {'x'.join(map(str, r['kernel'])):>9} {r['variant']:>22} {r['ms']:9.3f} ms"
    )
    speed = f"{r['useful_tflops']:6.1f} TF {r['tb_per_s']:5.2f} TB/s {r['of_dense_cudnn']:5.2f} of dense"
    ratios = f"{r['speedup_over_sdpa']:6.1f}x sdpa {r['speedup_over_row']:5.2f}x row  L2 {r['relative_l2']:.1e}"
    print(what, speed, ratios, flush=True)


def plot(path: Path) -> Path:
    """Bars of useful TFLOP/s per shape as an svg; drawn by hand, so that no plotting package is needed."""
    document = json.loads(path.read_text())
    shapes: dict[str, dict[str, float]] = {}
    for r in document["records"]:
        if r["ms"] and r["variant"].endswith("/views"):
            label = f"{'x'.join(map(str, r['grid']))} k{'x'.join(map(str, r['kernel']))}"
            shapes.setdefault(label, {})[r["variant"].split("/")[0]] = r["useful_tflops"]
    colors = {"sdpa": "#999999", "row": "#d08770", "tile": "#5e81ac", "tile_bound": "#2e3440", "natten": "#a3be8c"}
    top = max(max(bars.values()) for bars in shapes.values())
    lines, y = [], 40
    for label, bars in shapes.items():
        lines.append(f'<text x="10" y="{y + 12}" font-weight="bold">{label}</text>')
        for name, value in bars.items():
            y += 18
            color = colors.get(name, "#b48ead")
            lines.append(f'<text x="20" y="{y + 12}">{name}</text>')
            lines.append(f'<rect x="110" y="{y}" width="{value / top * 480:.1f}" height="14" fill="{color}"/>')
            lines.append(f'<text x="{114 + value / top * 480:.1f}" y="{y + 12}">{value:.0f}</text>')
        y += 26
    head = f"useful TFLOP/s, {document['device']}, views of a fused QKV projection, {document['date']}"
    svg = path.with_suffix(".svg")
    body = "\n".join(lines)
    size = f'width="660" height="{y + 10}" font-family="sans-serif" font-size="12"'
    svg.write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" {size}>\n<rect width="100%" height="100%" fill="white"/>\n'
        f'<text x="10" y="20">{head}</text>\n{body}\n</svg>\n'
    )
    return svg


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=output_file, help="json to write")
    parser.add_argument("--plot", type=Path, help="draw this json instead of measuring")
    parser.add_argument("--seconds", type=seconds, default=4.0, help="timing time per shape")
    parser.add_argument("--grids", nargs="+", metavar="TxHxW", help="only these grids of the list")
    parser.add_argument("--limit", type=number, default=5e-3, help="relative L2 above which a variant is not timed")
    args = parser.parse_args()
    if args.plot:
        print(plot(args.plot))
        return
    if not torch.cuda.is_available():
        raise SystemExit("bench_na3d.py measures on a GPU and found none")
    torch.manual_seed(0)
    records: list[dict] = []
    for grid, kernel in SHAPES:
        if args.grids and "x".join(map(str, grid[:3])) not in args.grids:
            continue
        records += measure(grid, kernel, args.seconds, args.limit)
        torch.cuda.empty_cache()
    import triton

    document = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "date": date.today().isoformat(),
        "command": " ".join(["python", *sys.argv]),
        "records": records,
    }
    if args.out:
        args.out.write_text(json.dumps(document, indent=1))
    print(json.dumps(document))


if __name__ == "__main__":
    main()
