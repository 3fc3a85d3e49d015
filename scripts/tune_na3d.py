"""Sweep launch parameters of na3d_flash_attn on the GPU at hand and rewrite configs/<arch>.json.

    python scripts/tune_na3d.py            (sweeps, prints, rewrites the json of this architecture)
    python scripts/tune_na3d.py --dry_run  (does not rewrite; --out keeps the times)

Every candidate is checked against tiled SDPA in fp32 on a small grid, borders included, before it is timed. All rules
that name a swept kernel size are replaced by its fastest candidates, for head_dim up to 64; rules that name none, or
another, stay.
"""

import argparse
import dataclasses
import importlib.util
import itertools
import json
import statistics
import sys
from datetime import date
from pathlib import Path

import torch
from arguments import output_file

sys.path.insert(0, str(Path(__file__).parent.parent))
from layers.neighborhood_attention import configs, na3d_flash_attn, neighborhood_attention_sdpa
from layers.neighborhood_attention.configs import RowConfig, TileConfig
from layers.neighborhood_attention.race import device_milliseconds

# Kernel size -> (T, H, W, heads) it is timed on: the decoder's stages, and the published wide row.
FAMILIES = {
    (3, 7, 7): (18, 32, 48, 32),
    (3, 5, 5): (40, 96, 96, 8),
    (11, 11, 11): (40, 96, 96, 4),
    (3, 5, 27): (4, 8, 128, 4),
}
HEAD_DIM = 64


def tile_candidates(amd: bool, hopper: bool) -> list[TileConfig]:
    """Blocks worth trying; a warp owns 16 queries on NVIDIA, 32 or 16 on AMD."""
    small, large = ((4, 4, 4), (2, 4, 8)), ((4, 4, 8), (8, 4, 4))
    if amd:
        shapes = ((2, 32), (4, 16), (4, 32))
        return [
            TileConfig(tile, block_kv, warps, stages, mfma_size=size)
            for tile, block_kv, stages, (warps, size) in itertools.product(small, (32, 64), (1, 2), shapes)
        ]
    if not hopper:
        return [TileConfig(t, kv, 4, stages) for t, kv, stages in itertools.product(small, (32, 64, 128), (2, 3))] + [
            TileConfig(t, 64, 8, stages) for t, stages in itertools.product(large, (2, 3))
        ]
    found = []
    for tile, stages, (in_registers, limit) in itertools.product(
        small, (2, 3), ((True, 128), (False, 128), (True, 168))
    ):
        found.append(TileConfig(tile, 64, 4, stages, True, in_registers, True, limit))
    for tile in small:
        found.append(TileConfig(tile, 32, 4, 3, True, True, True, 128))
        found.append(TileConfig(tile, 128, 4, 2, False, True, True, 168))
        found.append(TileConfig(tile, 128, 4, 2, False, False, True, 0))
    return found + [TileConfig(tile, 64, 8, stages, True, True, True, 128) for tile in large for stages in (2, 3)]


def walk_candidates(found: list[dict]) -> list[TileConfig]:
    """The fastest config of each tile that the Hopper kernel takes, along each axis; it still serves other calls."""
    fastest: dict[tuple[int, int, int], TileConfig] = {}
    for config in (f["config"] for f in found):
        if config.max_registers == 128 and any(map(config.can_walk, configs.WALK_ORDERS)):
            fastest.setdefault(config.tile, config)
    return [
        dataclasses.replace(config, walk=axis)
        for config, axis in itertools.product(fastest.values(), configs.WALK_ORDERS)
        if config.can_walk(axis)
    ]


def row_candidates(kernel_w: int) -> list[RowConfig]:
    """The published blocks with fewer warps (the published four all repeat the score product) and other depths."""
    blocks = ((16, 32, 17), (32, 64, 33)) if kernel_w <= 17 else ((32, 64, 33),)
    return [
        RowConfig(widest, block_q, block_kv, warps, stages)
        for (block_q, block_kv, widest), warps, stages in itertools.product(blocks, (1, 2, 4), (2, 4))
    ]


def make_qkv(grid: tuple[int, ...]) -> tuple[torch.Tensor, ...]:
    qkv = torch.randn(1, *grid[:3], 3, grid[3], HEAD_DIM, device="cuda")
    qkv[:, :, :, :, :2] *= qkv[:, :, :, :, :2].square().mean(-1, keepdim=True).rsqrt()
    qkv[:, :, :, :, 0] *= HEAD_DIM**-0.5
    return qkv.bfloat16().unbind(4)


def error_of(config: TileConfig | RowConfig, kernel: tuple[int, int, int]) -> float:
    """Largest relative L2 over a grid that divides by nothing and one that equals the kernel, online and bounded."""
    worst = 0.0
    for grid in (tuple(k + extra for k, extra in zip(kernel, (6, 7, 10), strict=True)), kernel):
        q, k, v = make_qkv((*grid, 2))
        expected = neighborhood_attention_sdpa(q.float(), k.float(), v.float(), kernel)
        for bound in (None, 8.2):
            out = na3d_flash_attn(q, k, v, kernel, config=config, softmax_bound=bound)
            worst = max(worst, ((out.float() - expected).norm() / expected.norm()).nan_to_num(float("inf")).item())
    return worst


def milliseconds(config: TileConfig | RowConfig, kernel: tuple[int, int, int], qkv: tuple[torch.Tensor, ...]) -> float:
    times = [device_milliseconds(lambda: na3d_flash_attn(*qkv, kernel, config=config)) for _ in range(9)]
    return statistics.median(times[2:])


def sweep(kernel: tuple[int, int, int], candidates: list) -> list[dict]:
    """Right candidates with their milliseconds, fastest first; wrong and uncompilable ones are printed and left out."""
    from triton.runtime.errors import OutOfResources

    qkv = make_qkv(FAMILIES[kernel])
    found = []
    for config in candidates:
        try:
            error = error_of(config, kernel)
            ms = milliseconds(config, kernel, qkv) if error < 5e-3 else None
        except OutOfResources as reason:
            print(f"{kernel} {config}: {reason}", flush=True)
            continue
        print(f"{kernel} {configs.as_entry(config)} relative L2 {error:.1e}: {ms and round(ms, 4)} ms", flush=True)
        if ms is not None:
            found.append({"config": config, "ms": ms})
    return sorted(found, key=lambda f: f["ms"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry_run", action="store_true", help="print and keep --out, leave the config json alone")
    parser.add_argument(
        "--check_only", action="store_true", help="check without timing: fills Triton's cache, in parallel"
    )
    parser.add_argument("--kernels", nargs="*", default=[",".join(map(str, k)) for k in FAMILIES], help="e.g. 3,7,7")
    parser.add_argument("--out", type=output_file, help="json with every candidate's time")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("tune_na3d.py measures on a GPU and found none")
    arch = configs.arch_of(torch.device("cuda", 0))
    path = configs.FOLDER / f"{arch}.json"
    document = json.loads(path.read_text())
    amd, times = torch.version.hip is not None, {}
    for kernel in (k for k in FAMILIES if ",".join(map(str, k)) in args.kernels):
        if args.check_only:
            for config in (*tile_candidates(amd, arch == "sm90"), *row_candidates(kernel[2])):
                print(kernel, config, error_of(config, kernel), flush=True)
            continue
        tiles = sweep(kernel, tile_candidates(amd, arch == "sm90"))
        if arch == "sm90":
            tiles = sorted(tiles + sweep(kernel, walk_candidates(tiles)), key=lambda f: f["ms"])
        rows = sweep(kernel, row_candidates(kernel[2]))
        winner = "tile" if tiles[0]["ms"] <= rows[0]["ms"] else "row"
        for name, best in (("tile", tiles[0]), ("row", rows[0])):
            entry = {"kernel_size": list(kernel), "max_head_dim": HEAD_DIM, **configs.as_entry(best["config"])}
            others = [e for e in document[name] if e.get("kernel_size") != list(kernel)]
            document[name] = [entry, *others]
        others = [e for e in document["schedules"] if e.get("kernel_size") != list(kernel)]
        document["schedules"] = [{"kernel_size": list(kernel), "max_head_dim": HEAD_DIM, "schedule": winner}, *others]
        times[str(kernel)] = {
            name: [{"ms": f["ms"], **configs.as_entry(f["config"])} for f in found]
            for name, found in (("tile", tiles), ("row", rows))
        }
        print(f"{kernel}: {winner}; tile {tiles[0]}, row {rows[0]}", flush=True)
        if args.out:
            args.out.write_text(json.dumps(times, indent=1))
    import triton

    document["evidence"] = (
        f"Measured by scripts/tune_na3d.py on {torch.cuda.get_device_name()}, torch {torch.__version__}, "
        f"triton {triton.__version__}, {date.today()}: the rules that name a kernel size. Other rules were not swept."
    )
    if not (args.dry_run or args.check_only):
        configs.parse(document)
        path.write_text(configs.as_text(document))
    print(json.dumps({k: {n: f[:1] for n, f in v.items()} for k, v in times.items()}))


if __name__ == "__main__":
    assert importlib.util.find_spec("triton"), "tune_na3d.py needs Triton"
    main()
