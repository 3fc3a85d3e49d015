"""Every input error that needs neither weights nor files, by its message; the plan and the memory estimate."""

import dataclasses
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from runner import preflight
from runner.checks import check
from runner.config import RunConfig
from runner.errors import UsageError
from runner.plan import memory_problem, plan, render
from runner_models.ltx2 import load
from runner_models.ltx2.decoder.options import DecodeOptions
from runner_models.ltx2.recipes import DISTILLED, FULL, Recipe

T2V: dict[str, Any] = {"model": "tiny", "task": "t2v", "prompt": ("x",)}
I2V: dict[str, Any] = {"model": "tiny", "task": "i2v", "prompt": ("x",), "input_images": ("a.png",)}
TINY_FULL: dict[str, Any] = {**T2V, "model": "tiny-full"}


def config(values: dict[str, Any] | None = None, **changes: Any) -> RunConfig:
    return RunConfig.from_values({**(values or T2V), **changes})


FIXED_STEPS = "is not allowed: the distilled model has a fixed schedule of 8 steps; leave it out or give 8."
NO_GUIDANCE = (
    "is not allowed: the distilled model was trained to run without guidance, which is 1; leave it out, or use "
    "--model LTX-2.5-full."
)
SIZE_64 = "the distilled model takes multiples of 64 from 256, the nearest"
SIZE_32 = "the full model takes multiples of 32 from 224, the nearest"

MISTAKES = [
    (T2V, {"height": 700}, f"--height 700 is not a multiple of 64; {SIZE_64} are 640 and 704."),
    (T2V, {"height": 672}, f"--height 672 is not a multiple of 64; {SIZE_64} are 640 and 704."),
    (T2V, {"width": 1080}, f"--width 1080 is not a multiple of 64; {SIZE_64} are 1024 and 1088."),
    (T2V, {"height": 192}, f"--height 192 is below the minimum of 256; {SIZE_64} is 256."),
    (T2V, {"width": -64}, f"--width -64 is below the minimum of 256; {SIZE_64} is 256."),
    (TINY_FULL, {"height": 240}, f"--height 240 is not a multiple of 32; {SIZE_32} are 224 and 256."),
    (TINY_FULL, {"width": 192}, f"--width 192 is below the minimum of 224; {SIZE_32} is 224."),
    (T2V, {"num_frames": 120}, "--num_frames 120 is not 8*k+1; the nearest valid counts are 113 and 121."),
    (T2V, {"num_frames": 18}, "--num_frames 18 is not 8*k+1; the nearest valid counts are 17 and 25."),
    (T2V, {"num_frames": 9}, "--num_frames 9 is below the minimum of 17; the nearest valid count is 17."),
    (T2V, {"num_frames": 0}, "--num_frames 0 is below the minimum of 17; the nearest valid count is 17."),
    (T2V, {"frame_rate": 0.0}, "--frame_rate 0 is not a number above 0; the model was trained at 24."),
    (T2V, {"frame_rate": -24.0}, "--frame_rate -24 is not a number above 0; the model was trained at 24."),
    (T2V, {"frame_rate": float("nan")}, "--frame_rate nan is not a number above 0; the model was trained at 24."),
    (T2V, {"frame_rate": float("inf")}, "--frame_rate inf is not a number above 0; the model was trained at 24."),
    (
        T2V,
        {"frame_rate": 1e-320},
        "--num_frames 121 at --frame_rate 9.99989e-321 last longer than an hour; give fewer frames, or at least 0.034 "
        "frames per second.",
    ),
    (T2V, {"frame_rate": 1e5}, "--frame_rate 100000 leaves no room for sound; for 121 frames give at most 3025."),
    (T2V, {"num_inference_steps": 20}, f"--num_inference_steps 20 {FIXED_STEPS}"),
    (T2V, {"num_inference_steps": 0}, f"--num_inference_steps 0 {FIXED_STEPS}"),
    (T2V, {"guidance_scale": 3.0}, f"--guidance_scale 3 {NO_GUIDANCE}"),
    (T2V, {"guidance_scale": float("nan")}, f"--guidance_scale nan {NO_GUIDANCE}"),
    (
        TINY_FULL,
        {"num_inference_steps": 1},
        "--num_inference_steps 1 is too few; the nearest valid number is 2.",
    ),
    (
        TINY_FULL,
        {"guidance_scale": 0.5},
        "--guidance_scale 0.5 is not a number from 1 (no video CFG); the nearest valid value is 1.",
    ),
    (
        TINY_FULL,
        {"guidance_scale": float("inf")},
        "--guidance_scale inf is not a number from 1 (no video CFG); the nearest valid value is 1.",
    ),
    (
        T2V,
        {"max_sequence_length": 1000},
        "--max_sequence_length 1000 is not a multiple of 128; the nearest valid are 896 and 1024.",
    ),
    (
        T2V,
        {"max_sequence_length": 0},
        "--max_sequence_length 0 is not a multiple of 128; the nearest valid is 128.",
    ),
    (T2V, {"seed": -1}, "--seed -1 is not from 0 to 9223372036854775807; the nearest is 0."),
    (
        T2V,
        {"seed": 2**63},
        "--seed 9223372036854775808 is not from 0 to 9223372036854775807; the nearest is 9223372036854775807.",
    ),
    (T2V, {"prompt": ()}, "--prompt is missing; give one or more, or --dataset_path."),
    (T2V, {"prompt": ("a", " \n")}, "--prompt number 2 is blank; say what to show."),
    (
        TINY_FULL,
        {"prompt": ("a", "b", "c"), "negative_prompt": ("n", "m")},
        "--negative_prompt has 2 texts for 3 prompts; give 1 for all or 3.",
    ),
    (I2V, {"input_images": ()}, "--task i2v needs exactly one of --input_images, got 0."),
    (I2V, {"input_images": ("a", "b")}, "--task i2v needs exactly one of --input_images, got 2."),
    (
        T2V,
        {"input_images": ("a",)},
        "--task t2v takes no --input_images, got 1; use --task i2v, or leave the image out.",
    ),
    (T2V, {"num_iterations": 0}, "--num_iterations 0 is below the minimum of 1; give 1 or more."),
    (T2V, {"warmup_calls": -1}, "--warmup_calls -1 is below the minimum of 0; give 0 or more."),
    (
        T2V,
        {"device": "cuda"},
        "--device cuda asks for a GPU and torch sees none here; use --device cpu, or install a torch for the GPU.",
    ),
    (
        T2V,
        {"enable_model_cpu_offload": True},
        "--enable_model_cpu_offload frees GPU memory and this run has no GPU; leave it out.",
    ),
]


@pytest.mark.parametrize(("values", "mistake", "message"), MISTAKES, ids=[f"{m[1]}" for m in MISTAKES])
def test_mistakes(values: dict[str, Any], mistake: dict[str, Any], message: str) -> None:
    check(config(values))
    with pytest.raises(UsageError) as caught:
        check(config(values, **mistake))
    assert str(caught.value) == message


def test_several_mistakes_are_a_line_each() -> None:
    with pytest.raises(UsageError) as caught:
        check(config(height=700, num_frames=120, seed=-1))
    assert [line.split()[0] for line in str(caught.value).splitlines()] == ["--height", "--num_frames", "--seed"]


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        (
            {"decode_chunk_frames": 12},
            "12 is not a multiple of 8; the nearest valid are 8 and 16.",
        ),
        ({"decode_chunk_frames": 0}, "--decode_chunk_frames 0 is not a multiple of 8; the nearest valid is 8."),
        ({"decode_chunk_frames": 8, "vae_decode": "conv"}, "--decode_chunk_frames 8 needs --vae_decode exact"),
        ({"vae_decode": "conv", "use_parallel_vae": True, "ulysses_degree": 2}, "conv decodes on one rank"),
        (
            {"use_parallel_vae": True, "ulysses_degree": 16, "height": 256, "width": 320},
            "has 10 latent rows to share; use at most 10 ranks a video",
        ),
    ],
)
def test_decodes_that_cannot_be(changes: dict[str, Any], part: str) -> None:
    world = changes.get("ulysses_degree", 1)
    with pytest.raises(UsageError) as caught:
        check(config(**changes), world_size=world)
    assert part in str(caught.value)
    assert "\n" not in str(caught.value)


def test_decode_options() -> None:
    assert config().decode_options == DecodeOptions()
    asked = config(use_parallel_vae=True, decode_chunk_frames=16).decode_options
    assert asked == DecodeOptions("exact", parallel=True, streaming=True, chunk_frames=16)
    assert config(enable_tiling=True).decode_options == DecodeOptions(streaming=True)
    check(config(use_parallel_vae=True, ulysses_degree=8, height=512, width=512), world_size=8)


class TestDegrees:
    @pytest.mark.parametrize(
        ("degrees", "world_size", "parts"),
        [
            ((4, 1, 1), 8, ("--ulysses_degree 4", "8 processes were started", "8 x 1, 4 x 2, 2 x 4, 1 x 8")),
            ((1, 1, 1), 2, ("--ulysses_degree 1", "2 processes were started", "2 x 1, 1 x 2")),
            ((2, 2, 1), 1, ("--ulysses_degree 2 x --ring_degree 2", "torchrun --nproc_per_node=N")),
            ((0, 1, 1), 1, ("--ulysses_degree 0 must be at least 1",)),
            ((1, -2, 1), 1, ("--ring_degree -2 must be at least 1",)),
            ((1, 1, 0), 1, ("--data_parallel_degree 0 must be at least 1",)),
            ((3, 1, 1), 3, ("--ulysses_degree 3 does not divide the model's 32 attention heads", "1, 2, 4, 8, 16, 32")),
        ],
    )
    def test_refused(self, degrees: tuple[int, int, int], world_size: int, parts: tuple[str, ...]) -> None:
        ulysses, ring, data = degrees
        run = config(ulysses_degree=ulysses, ring_degree=ring, data_parallel_degree=data)
        with pytest.raises(UsageError) as caught:
            check(run, world_size=world_size, num_heads=32)
        for part in parts:
            assert part in str(caught.value)
        assert "\n" not in str(caught.value)

    def test_product_may_be_the_world_size(self) -> None:
        check(config(ulysses_degree=2, ring_degree=2, data_parallel_degree=2), world_size=8, num_heads=32)

    def test_more_processes_than_gpus(self) -> None:
        run = config(ulysses_degree=4)
        with pytest.raises(UsageError) as caught:
            check(run, world_size=4, local_world_size=4, gpu_count=2)
        assert str(caught.value) == (
            "4 processes on this machine and 2 GPUs; start 2 with torchrun --nproc_per_node=2, or use --device cpu."
        )
        check(dataclasses.replace(run, device="cpu"), world_size=4, local_world_size=4, gpu_count=2)


@pytest.mark.parametrize(
    ("device", "dtype", "gpu_count", "settled"),
    [
        ("auto", "auto", 0, ("cpu", "float32")),
        ("auto", "auto", 1, ("cuda", "bfloat16")),
        ("cpu", "auto", 1, ("cpu", "float32")),
        ("cuda", "float16", 1, ("cuda", "float16")),
        ("auto", "bfloat16", 0, ("cpu", "bfloat16")),
    ],
)
def test_device_and_dtype_are_settled(device: str, dtype: str, gpu_count: int, settled: tuple[str, str]) -> None:
    checked = check(config(device=device, dtype=dtype), gpu_count=gpu_count)
    assert (checked.device, checked.dtype) == settled


def test_a_negative_prompt_without_effect_is_said(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        check(config())
        check(config(TINY_FULL, negative_prompt=("n",)))
        assert not caplog.messages
        check(config(negative_prompt=("n",)))
    assert caplog.messages == ["--negative_prompt has no effect: the distilled model runs without guidance"]


def test_one_negative_prompt_serves_all_and_several_go_one_to_one() -> None:
    assert config(TINY_FULL, prompt=("a", "b"), negative_prompt=("n",)).negative_prompts == ("n", "n")
    assert config(TINY_FULL, prompt=("a", "b"), negative_prompt=("n", "m")).negative_prompts == ("n", "m")


def test_output_stem() -> None:
    run = config(TINY_FULL, ulysses_degree=2, ring_degree=4, use_torch_compile=True, height=512, width=768)
    assert run.output_stem(3) == "ltx_2_5_full_video_u2r4_tc_True_512x768_t2v_3"


def test_plan_distilled() -> None:
    run = check(config(I2V, height=576, width=960, num_frames=97, output_directory="out/", prompt=("a", "b")))
    found = plan(run, memory_bytes={"weights": 3, "peak": 5}, available_bytes=7)
    assert json.loads(json.dumps(found)) == found
    first, second = found["stages"]
    assert first["latent_grid"] == {"frames": 13, "rows": 9, "columns": 15}
    assert (first["video_tokens"], first["height_pixels"], first["width_pixels"]) == (1755, 288, 480)
    assert (first["steps"], second["steps"], second["sigmas"]) == (8, 3, [0.909375, 0.725, 0.421875])
    assert second["latent_grid"] == {"frames": 13, "rows": 18, "columns": 30}
    assert (second["video_tokens"], second["audio_tokens"]) == (7020, 101)
    assert found["audio"] == {"duration_seconds": 97 / 24, "latent_frames": 101}
    assert (found["device"], found["dtype"]) == ("cpu", "float32")
    assert found["outputs"][1] == "out/ltx_2_5_distilled_video_u1r1_tc_False_576x960_i2v_1.mp4"
    assert (found["memory_bytes"], found["available_memory_bytes"]) == ({"weights": 3, "peak": 5}, 7)


def test_plan_full() -> None:
    run = check(config(TINY_FULL, height=224, width=256, num_frames=17, num_inference_steps=12, guidance_scale=4.5))
    (stage,) = plan(run)["stages"]
    assert stage["latent_grid"] == {"frames": 3, "rows": 7, "columns": 8}
    assert (stage["steps"], stage["sigmas"]) == (12, None)
    assert stage["guidance"]["video"] == {"cfg": 4.5, "stg": 1.0, "modality": 3.0, "rescale": 0.7}
    assert stage["guidance"]["audio"]["cfg"] == 7.0
    text = render(plan(run))
    assert "video guidance: cfg 4.5, stg 1, modality 3, rescale 0.7" in text
    assert "memory" not in text
    assert "upsample" not in text


def fake_estimate(recipe: Recipe, *, height: int, width: int, num_frames: int, **rest: Any) -> dict[str, int]:
    """One byte a pixel and element byte, plus 1 MB of weights that offloading halves."""
    assert recipe in (DISTILLED, FULL)
    assert rest.keys() == {"dtype", "load_format", "model", "offload", "sequence_degree", "decode"}
    weights = 500_000 if rest["offload"] else 1_000_000
    return {"peak": weights + height * width * num_frames * (4 if rest["dtype"] == "float32" else 2)}


def offers(run: RunConfig, available_bytes: int, estimate: Callable[..., dict[str, int]] = fake_estimate) -> str:
    problem = memory_problem(run, estimate=estimate, available_bytes=available_bytes)
    assert problem is not None
    return problem.partition(" is available; ")[2]


def test_a_request_that_fits_is_no_problem() -> None:
    run = check(config(height=256, width=256, num_frames=17))
    exact = fake_estimate(
        DISTILLED,
        height=256,
        width=256,
        num_frames=17,
        dtype="float32",
        load_format="",
        model="",
        offload=False,
        sequence_degree=1,
        decode=run.decode_options,
    )["peak"]
    assert memory_problem(run, estimate=fake_estimate, available_bytes=exact) is None
    assert memory_problem(run, estimate=fake_estimate, available_bytes=exact - 1) is not None


def test_an_absurd_size_is_refused_with_numbers_and_what_fits() -> None:
    run = check(config(height=1024, width=1536, num_frames=12_001))
    assert memory_problem(run, estimate=fake_estimate, available_bytes=2**30) == (
        "--height 1024 --width 1536 --num_frames 12001 needs about 70.3 GiB of cpu memory and 1.0 GiB is available; "
        "what fits: --num_frames 169."
    )


def test_what_fits_does_fit_and_is_the_largest() -> None:
    run = check(config(height=1024, width=1536, num_frames=121))
    available = 1_000_000 + 1024 * 1536 * 4 * 57
    assert offers(run, available) == "what fits: --num_frames 57, or --height 640 --width 1024."
    for frames in range(17, 121, 8):
        fits = 1_000_000 + 1024 * 1536 * 4 * frames
        assert f"--num_frames {frames}," in offers(run, fits)
        assert f"--num_frames {frames}," not in offers(run, fits - 1)
    larger = 1_000_000 + 1024 * 1536 * 2 * 121
    assert offers(run, larger).startswith("what fits: --dtype bf16, or --num_frames 57, or ")
    gpu = check(config(dtype="float32"), gpu_count=1)
    needed = 1_000_000 + 1024 * 1536 * 4 * 121
    assert offers(gpu, needed - 1).startswith("what fits: --enable_model_cpu_offload, or --dtype bf16, or ")


def test_when_no_single_change_is_enough() -> None:
    smallest = 1_000_000 + 256 * 256 * 17 * 2
    run = check(config(height=2048, width=2048))
    assert offers(run, smallest) == "with --dtype bf16 a smaller size fits."
    assert offers(run, smallest - 1) == "no size of this model fits; use a machine with more memory."
    gpu = check(config(height=2048, width=2048, dtype="float32"), gpu_count=1)
    assert offers(gpu, smallest - 500_000) == "with --enable_model_cpu_offload and --dtype bf16 a smaller size fits."
    half = check(config(height=2048, width=2048), gpu_count=1)
    assert offers(half, smallest - 1) == "with --enable_model_cpu_offload a smaller size fits."


def test_preflight_settles_the_config_and_refuses_what_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    small = config(height=256, width=256, num_frames=17, device="cpu")
    assert preflight.preflight(small, environ={}).dtype == "float32"
    with pytest.raises(UsageError, match=r"--height 65536 --width 65536 .* GiB of cpu memory and .* GiB is available"):
        preflight.check_memory(check(config(height=65536, width=65536, device="cpu")), environ={})
    with pytest.raises(UsageError, match="2 processes were started"):
        preflight.preflight(small, environ={"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"})
    monkeypatch.setattr(preflight.psutil, "virtual_memory", lambda: type("Memory", (), {"available": 1000}))
    with pytest.raises(UsageError, match="divide the model's 8 attention heads"):
        preflight.preflight(
            config(height=256, width=256, num_frames=17, device="cpu", ulysses_degree=3),
            environ={"WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "3"},
        )
    assert preflight.available_bytes(check(small), environ={"LOCAL_WORLD_SIZE": "4"}) == 250


def test_a_checkpoint_folder_is_gone_through_once(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder of 66 GB on a network disk: its files are opened once before the run, not by every question about it."""
    passes: list[Path] = []
    checked = load._checked
    monkeypatch.setattr(load, "_checked", lambda folder, *rest: (passes.append(folder), checked(folder, *rest))[1])
    run = config(model=str(tiny_folder), height=256, width=256, num_frames=17, device="cpu")
    preflight.check_memory(preflight.preflight(run, environ={}), environ={})
    assert passes == [tiny_folder]
