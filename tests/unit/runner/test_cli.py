"""The command line: xfuser's names, files of flags, prompts, and what is refused with which words."""

import dataclasses
import json
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from runner import __version__
from runner.checks import check
from runner.cli import build_parser, parse
from runner.config import RunConfig
from runner.errors import UsageError
from runner.flags import FLAGS, GROUPS, read_values
from runner.plan import render
from runner.preflight import make_plan
from runner.xfuser_flags import UNSUPPORTED

BASE = "--model tiny --task t2v"
DESIGN = (
    "--model Lightricks/LTX-2.5-Diffusers --task i2v --input_images cat.png --resize_input_images --height 1536 "
    "--width 1024 --num_frames 121 --num_inference_steps 8 --seed 42 --use_torch_compile --attention_backend AITER "
    "--num_iterations 2 --ulysses_degree 8 --use_parallel_vae --prompt 'a potter shapes clay'"
)
# Every flag of add_runner_args in xfuser 0.7.0; name=VALUE is a default that is not "not given".
_XFUSER = """
    attention_backend batch_size cache_config cache_method cross_attention_backend data_parallel_degree=1
    dataset_path determinism_check=0 determinism_check_report_ranks=last distilled_transformer_2_path
    distilled_transformer_path enable_group_cpu_offload enable_model_cpu_offload enable_sequential_cpu_offload
    enable_slicing enable_tiling flow_shift fp8_comms_safety_factor=0.85 fp8_comms_scale
    fp8_precision_override_prefix_patterns fp8_precision_override_suffix_patterns fully_shard_degree=1
    gemm_config gemm_quantization group_offload_low_cpu_mem guidance_scale guidance_scale_2 height
    hybrid_attn_high_precision_backend hybrid_attn_low_precision_backend hybrid_attn_schedule input_images
    max_sequence_length memory_efficient_replicated_load memory_efficient_sharding model negative_prompt
    no_reshard_after_forward num_frames num_hybrid_attn_high_precision_steps
    num_hybrid_gemm_high_precision_steps num_inference_steps num_iterations=1 output_directory=.
    pipefusion_parallel_degree=1 profile profile_active=1 profile_capture_phase profile_wait=2 profile_warmup=2
    profile_with_stack prompt resize_input_images ring_degree=1 seed=42 spargeattn_cdfthreshold=0.92
    spargeattn_reorder_sequence no-spargeattn_reorder_sequence spargeattn_simthreshold=0.3 task
    tensor_parallel_degree=1 text_encoder_tp_degree=1 ulysses_degree=1 use_cfg_parallel use_fbcache
    use_fp4_gemms use_fp8_comms use_fp8_gemms use_fp8_text_encoder use_hybrid_attn_schedule
    use_hybrid_gemm_schedule use_int8_gemms use_parallel_vae use_spargeattn_head_balance
    use_spargeattn_static_block_mask no-use_spargeattn_static_block_mask use_ssta_sparse_text_to_image
    use_teacache use_torch_compile use_vae_channels_last_format use_vsa_first_frame_mask
    no-use_vsa_first_frame_mask use_vsa_static_block_mask no-use_vsa_static_block_mask vae_tile_overlap_height
    vae_tile_overlap_width vae_tile_size_height vae_tile_size_width vsa_block_size=128 vsa_collect_density
    vsa_drop_rates vsa_prob_threshold=0.9 vsa_reorder_sequence no-vsa_reorder_sequence vsa_top_k=1
    vsa_top_k_ratio=0.0 warmup_calls=0 width
"""
XFUSER_FLAGS = _XFUSER.split()


def run(line: str) -> RunConfig:
    return parse(shlex.split(line))


def refused(line: str) -> str:
    with pytest.raises(UsageError) as caught:
        run(line)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_designs_command_line() -> None:
    config = run(DESIGN)
    assert (config.model, config.task, config.height, config.width) == (
        "Lightricks/LTX-2.5-Diffusers",
        "i2v",
        1536,
        1024,
    )
    assert (config.input_images, config.resize_input_images, config.num_frames) == (("cat.png",), True, 121)
    assert (config.attention_backend, config.ulysses_degree, config.ring_degree) == ("AITER", 8, 1)
    assert (config.use_torch_compile, config.use_parallel_vae, config.num_iterations) == (True, True, 2)
    assert config.prompt == ("a potter shapes clay",)
    assert config.output_stem(0) == "ltx_2_5_distilled_video_u8r1_tc_True_1536x1024_i2v_0"


def test_designs_command_line_passes_every_check() -> None:
    check(run(DESIGN), world_size=8, local_world_size=8, gpu_count=8)


def test_designs_command_line_with_neutral_values() -> None:
    line = DESIGN.replace("--use_torch_compile", "").replace("--attention_backend AITER", "")
    line = line.replace("--use_parallel_vae", "").replace("--ulysses_degree 8", "--ulysses_degree 1 --ring_degree 1")
    assert check(run(f"{line} --data_parallel_degree 1")).device == "cpu"


def test_defaults() -> None:
    config = run(f"{BASE} --prompt x")
    assert (config.height, config.width, config.num_frames, config.frame_rate) == (1024, 1536, 121, 24.0)
    assert (config.num_inference_steps, config.guidance_scale, config.max_sequence_length) == (8, 1.0, 1024)
    assert (config.seed, config.num_iterations, config.warmup_calls, config.output_directory) == (42, 1, 0, ".")
    assert (config.negative_prompts, config.load_format, config.device, config.dtype) == (("",), "auto", "auto", "auto")
    full = run("--model LTX-2.5-full --task t2v --prompt x y")
    assert (full.num_inference_steps, full.guidance_scale) == (30, 3.0)
    assert len(full.negative_prompts) == 2
    assert full.negative_prompts[0].startswith("blurry")


def test_dash_and_underscore_are_alike() -> None:
    assert run(f"{BASE} --num-frames 49 --output-directory=a-b --prompt 'x --num-frames y' --enable-tiling") == run(
        f"{BASE} --num_frames 49 --output_directory a-b --prompt 'x --num-frames y' --enable_tiling"
    )
    assert run(f"{BASE} --output-directory=a-b --prompt x").output_directory == "a-b"


def test_repeated_prompts_add_up() -> None:
    assert run(f"{BASE} --prompt a b --prompt c --negative_prompt n").prompts == ("a", "b", "c")


@pytest.mark.parametrize(
    ("spelling", "name"), [("fp32", "float32"), ("float32", "float32"), ("bf16", "bfloat16"), ("half", "float16")]
)
def test_dtype_names(spelling: str, name: str) -> None:
    assert run(f"{BASE} --prompt x --dtype {spelling}").dtype == name


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            "--task t2v --prompt x",
            "--model is missing; for a first try give --model tiny, for real videos --model LTX-2.5.",
        ),
        ("--model tiny --prompt x", "--task is missing; allowed: t2v, i2v."),
        (f"{BASE}2", "--task t2v2 is not known; did you mean t2v? allowed: t2v, i2v."),
        (
            "--model LTX-2.5-ful --task t2v",
            "--model LTX-2.5-ful is neither a known model nor a folder. Did you mean LTX-2.5-full? Known: "
            "Lightricks/LTX-2.5-Diffusers, LTX-2.5, LTX-2.5-distilled, LTX-2.5-full, tiny, tiny-full, or a local "
            "folder.",
        ),
        (f"{BASE} --seed 1.5", "--seed 1.5 is not an integer."),
        (f"{BASE} --seed {'9' * 5000}", f"--seed {'9' * 5000} is not an integer."),
        (f"{BASE} --height tall", "--height tall is not an integer."),
        (f"{BASE} --frame_rate fast", "--frame_rate fast is not a number."),
        (
            f"{BASE} --dtype bf61",
            "--dtype bf61 is not known; did you mean bf16? allowed: auto, fp32, float32, float, "
            "bf16, bfloat16, fp16, float16, half.",
        ),
        (f"{BASE} --device rocm", "--device rocm is not known; allowed: auto, cpu, cuda, gpu."),
        (f"{BASE} --load_format dumy", "--load_format dumy is not known; did you mean dummy? allowed: auto, dummy."),
        (f"{BASE} --seed", "--seed: expected one argument; see --help."),
        (f"{BASE} --promt x", "--promt is not a flag; did you mean --prompt?"),
        (f"{BASE} --num-frame=9", "--num_frame is not a flag; did you mean --num_frames?"),
        (f"{BASE} --qqqq", "--qqqq is not a flag; see --help."),
        (f"{BASE} x", "x belongs to no flag; flags start with --, and a prompt goes in quotes."),
        (f"{BASE} -n 5", "-n belongs to no flag; flags start with --, and a prompt goes in quotes."),
        (f"{BASE} --prompt x --dataset_path p.txt", "--prompt and --dataset_path are both given; give one of them."),
        (f"{BASE} --dataset_path none.txt", "--dataset_path none.txt does not exist; give a .csv or a text file."),
        (f"{BASE} --config none.yaml", "--config none.yaml does not exist."),
        (f"{BASE} --from_json none.json", "--from_json none.json does not exist."),
        (
            f"{BASE} --tensor_parallel_degree 2",
            "--tensor_parallel_degree 2 is a flag of xfuser that this runner does not support: use --ulysses_degree "
            "and --ring_degree to spread the transformer.",
        ),
        (
            f"{BASE} --cache-method teacache",
            "--cache_method teacache is a flag of xfuser that this runner does not support: caching steps changes the "
            "video; leave it out.",
        ),
    ],
)
def test_refusals(line: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert refused(line) == message


@pytest.mark.parametrize("entry", XFUSER_FLAGS)
def test_every_xfuser_flag_is_supported_or_has_advice(entry: str) -> None:
    name, _, default = entry.partition("=")
    key = name.replace("-", "_")
    assert (key in FLAGS) != (key in UNSUPPORTED)
    if key in UNSUPPORTED:
        message = refused(f"{BASE} --prompt x --{name} 77")
        assert message.startswith(f"--{key} 77 is a flag of xfuser that this runner does not support: ")
        assert message.endswith(".")
    elif default:
        assert getattr(run(f"{BASE} --prompt x"), key) == type(FLAGS[key].default)(default)
    if default:  # a command line that spells out xfuser's default keeps working
        assert run(f"{BASE} --prompt x --{name} {default}") == run(f"{BASE} --prompt x")


def test_advice_names_only_flags_that_exist() -> None:
    for _, advice in UNSUPPORTED.values():
        for word in advice.replace(",", " ").replace(";", " ").split():
            if word.startswith("--"):
                assert word[2:] in FLAGS, advice


class TestConfigFile:
    def write(self, tmp_path: Path, text: str) -> Path:
        path = tmp_path / "run.yaml"
        path.write_text(text)
        return path

    def test_command_line_wins(self, tmp_path: Path) -> None:
        path = self.write(
            tmp_path,
            "model: tiny\ntask: t2v\nnum-frames: 49\nframe_rate: 12\nuse_torch_compile: true\nprompt: [a, b]\nseed:\n",
        )
        config = run(f"--config {path}")
        assert (config.num_frames, config.frame_rate, config.use_torch_compile) == (49, 12.0, True)
        assert (config.prompt, config.seed) == (("a", "b"), 42)
        config = run(f"--num_frames 25 --no-use-torch-compile --resize_input_images --prompt c --config {path}")
        assert (config.num_frames, config.use_torch_compile, config.resize_input_images) == (25, False, True)
        assert config.prompt == ("c",)

    def test_switch_given_on_the_command_line_wins(self, tmp_path: Path) -> None:
        path = self.write(tmp_path, "enable_tiling: false\n")
        assert run(f"{BASE} --prompt x --enable_tiling --config {path}").enable_tiling
        assert not run(f"{BASE} --prompt x --config {path}").enable_tiling

    def test_prompts_and_dataset_stand_for_each_other(self, tmp_path: Path) -> None:
        prompts = tmp_path / "p.txt"
        prompts.write_text("from file\n")
        path = self.write(tmp_path, "prompt: from yaml\n")
        assert run(f"{BASE} --config {path}").prompt == ("from yaml",)
        assert run(f"{BASE} --config {path} --dataset_path {prompts}").prompt == ("from file",)
        path.write_text(f"dataset_path: {prompts}\n")
        assert run(f"{BASE} --config {path}").prompt == ("from file",)
        assert run(f"{BASE} --config {path} --prompt mine").prompt == ("mine",)

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("num_frame: 9", "--num_frame in {path} is not a flag; did you mean --num_frames?"),
            ("config: x", "--config in {path} cannot stand in a file; give it on the command line."),
            ("num_frames: '49'", "--num_frames 49 in {path} is not an integer."),
            ("num_frames: true", "--num_frames True in {path} is not an integer."),
            ("seed: 1.5", "--seed 1.5 in {path} is not an integer."),
            ("frame_rate: [1]", "--frame_rate [1] in {path} is not a number."),
            ("frame_rate: true", "--frame_rate True in {path} is not a number."),
            ("enable_tiling: 1", "--enable_tiling 1 in {path} is not true or false."),
            ("prompt: [a, 5]", "--prompt 5 in {path} is not text; put it in quotes."),
            ("task: i3v", "--task i3v in {path} is not known; did you mean i2v? allowed: t2v, i2v."),
            ("num-frames: 9\nnum_frames: 9", "--num_frames in {path} is given twice, once with '-' and once with '_'."),
            ("- a", "--config {path} holds no flags; write one a line, as in `num_frames: 121`."),
            ("", "--config {path} holds no flags; write one a line, as in `num_frames: 121`."),
            (
                "use_fp8_gemms: true",
                "--use_fp8_gemms True is a flag of xfuser that this runner does not support: matrix products are not "
                "quantised; use --dtype bf16 in {path}.",
            ),
        ],
    )
    def test_refusals(self, text: str, message: str, tmp_path: Path) -> None:
        path = self.write(tmp_path, text)
        assert refused(f"{BASE} --config {path}") == message.format(path=path)

    def test_damaged(self, tmp_path: Path) -> None:
        path = self.write(tmp_path, "a: [1")
        assert refused(f"{BASE} --config {path}").startswith(f"--config {path} is damaged: ")
        path.write_bytes(b"\xff\xfe\xfa")
        assert refused(f"{BASE} --config {path}").startswith(f"--config {path} is damaged: ")
        assert refused(f"{BASE} --config {tmp_path}") == f"--config {tmp_path} cannot be read: Is a directory."

    def test_neutral_values_of_xfusers_flags(self, tmp_path: Path) -> None:
        path = self.write(tmp_path, "use_fp8_gemms: false\nbatch_size: 1\ncache_method: null\n")
        assert run(f"{BASE} --prompt x --config {path}") == run(f"{BASE} --prompt x")


class TestFromJson:
    LINES = (
        f"{BASE} --prompt x",
        f"{BASE} --prompt 'é \"q\"' b --seed 7 --frame_rate 23.976 --dtype bf16 --device cpu --no_enable_tiling",
        "--model tiny-full --task i2v --input_images a.png --resize_input_images --prompt x y --negative_prompt n m "
        "--guidance_scale 4.5 --num_inference_steps 12 --height 224 --width 256 --num_frames 17 --output_directory o",
        DESIGN,
        *(
            f"{BASE} --prompt x --{flag.name} {'' if flag.kind == 'bool' else 3 if flag.kind != 'str' else 'SDPA'}"
            for flag in FLAGS.values()
            if not flag.several and flag.choices is None and flag.name not in ("model", "dataset_path")
        ),
    )

    @pytest.mark.parametrize("line", LINES)
    def test_round_trip(self, line: str, tmp_path: Path) -> None:
        config = run(line)
        text = json.dumps(config.to_json())
        assert RunConfig.from_values(read_values(json.loads(text), where=" in the json")) == config
        path = tmp_path / "video.json"
        path.write_text(json.dumps({"config": config.to_json(), "versions": {}}))
        assert run(f"--from_json {path}") == config
        # yaml reads json: the same file of flags serves as a --config.
        assert RunConfig.from_values(read_values(yaml.safe_load(text), where=" in the yaml")) == config

    def test_given_flags_and_config_win(self, tmp_path: Path) -> None:
        video, file = tmp_path / "video.json", tmp_path / "run.yaml"
        video.write_text(json.dumps({"config": run(f"{BASE} --prompt x --seed 7 --num_frames 49").to_json()}))
        file.write_text("seed: 8\nnum_frames: 25\n")
        config = run(f"--from_json {video} --config {file} --num_frames 17 --prompt y z")
        assert (config.seed, config.num_frames, config.prompts) == (8, 17, ("y", "z"))

    def test_refusals(self, tmp_path: Path) -> None:
        path = tmp_path / "video.json"
        path.write_text("{}")
        assert refused(f"--from_json {path}") == (
            f'--from_json {path} has no "config"; give the .json that lies beside a video.'
        )
        path.write_text('{"config": {"sed": 1}}')
        assert refused(f"--from_json {path}") == f"--sed in {path} is not a flag; did you mean --seed?"
        path.write_text("{")
        assert refused(f"--from_json {path}").startswith(f"--from_json {path} is damaged: ")


class TestPrompts:
    @pytest.mark.parametrize(
        ("name", "content", "prompts"),
        [
            ("p.txt", b"a cat\n\n  a dog  \r\nlast", ("a cat", "a dog", "last")),
            ("p.txt", b"\xef\xbb\xbfcaf\xc3\xa9\n", ("café",)),
            ("p.prompts", "a\u2028b\n".encode(), ("a\u2028b",)),
            ("p.csv", b'id,prompt\n1,"a cat, purring"\n2,"two\nlines"\n', ("a cat, purring", "two\nlines")),
            ("P.CSV", b"\xef\xbb\xbfprompt\na\n\nb\n", ("a", "b")),
        ],
    )
    def test_read(self, name: str, content: bytes, prompts: tuple[str, ...], tmp_path: Path) -> None:
        (tmp_path / name).write_bytes(content)
        assert run(f"{BASE} --dataset_path {tmp_path / name}").prompts == prompts

    @pytest.mark.parametrize(
        ("name", "content", "message"),
        [
            ("p.txt", b"", "holds no prompt."),
            ("p.txt", b" \n\n", "holds no prompt."),
            ("p.txt", b"a\xff", "is not UTF-8 text (byte 1); save it as UTF-8."),
            ("p.csv", b"", "is empty; its first line must name the columns, one of them `prompt`."),
            ("p.csv", b"id,text\n1,a\n", "has no column `prompt`; it has id, text."),
            ("p.csv", b"prompt\n", "holds no prompt."),
            ("p.csv", b"id,prompt\n1,a\n2, \n", "has a blank prompt in line 3."),
            ("p.csv", b"id,prompt\n1,a\n2\n", "has a blank prompt in line 3."),
            ("p.csv", b'prompt\n"a', "is not a valid csv file: unexpected end of data."),
        ],
    )
    def test_refusals(self, name: str, content: bytes, message: str, tmp_path: Path) -> None:
        path = tmp_path / name
        path.write_bytes(content)
        assert refused(f"{BASE} --dataset_path {path}") == f"--dataset_path {path} {message}"

    def test_folder(self, tmp_path: Path) -> None:
        assert refused(f"{BASE} --dataset_path {tmp_path}") == (
            f"--dataset_path {tmp_path} cannot be read: Is a directory."
        )


@pytest.mark.parametrize("columns", [80, 120])
def test_help_fits_one_screen_a_group(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    text = build_parser().format_help()
    groups = text.split("\n\n")
    assert all(f"--{name}" in text for name in FLAGS)
    assert "--tensor_parallel_degree" not in text
    for group in groups:
        assert len(group.splitlines()) <= 24, group
        assert max(map(len, group.splitlines())) <= columns, group
    assert [group.split(":\n")[0] for group in groups[2:-2]] == list(GROUPS)


def test_every_field_is_a_flag() -> None:
    assert {field.name for field in dataclasses.fields(RunConfig)} == set(FLAGS) - {"dataset_path"}


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        run("--version")
    assert caught.value.code == 0
    assert capsys.readouterr().out.strip() == __version__
    project = Path(__file__).parents[3] / "pyproject.toml"
    assert tomllib.loads(project.read_text())["project"]["version"] == __version__


def test_parsing_imports_neither_torch_nor_diffusers() -> None:
    code = (
        "import sys; from runner.cli import parse; parse(['--model', 'tiny', '--task', 't2v', '--prompt', 'x']); "
        "print([name for name in ('torch', 'diffusers', 'transformers', 'av') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_dry_run_prints_the_plan() -> None:
    text = render(
        make_plan(run(f"{BASE} --prompt x --device cpu --height 256 --width 320 --num_frames 17 --dry_run"), environ={})
    )
    for part in (
        "Plan (nothing is loaded)",
        "tiny (distilled), t2v",
        "cpu, float32",
        "320x256 (width x height), 17 frames at 24 frames/s: 0.71 s",
        "8 steps at 160x128: 3x4x5 latents (frames x rows x columns), 60 video + 18 audio tokens",
        "3 steps at 320x256: 3x8x10 latents (frames x rows x columns), 240 video + 18 audio tokens",
        "sigmas 0.909375, 0.725, 0.421875",
        "./ltx_2_5_distilled_video_u1r1_tc_False_256x320_t2v_0.mp4",
        "estimated per rank: weights",
    ):
        assert part in text


def test_dry_run_shows_a_run_that_does_not_fit_here() -> None:
    """A plan for a bigger machine is read on a laptop: the verdict is a line of it, not the end of it."""
    line = "--model LTX-2.5 --task t2v --prompt x --device cpu --height 16384 --width 16384 --dry_run"
    plan = make_plan(run(line), environ={})
    assert plan["fits"] is False
    assert "does not fit here: --height 16384 --width 16384 --num_frames 121 needs about" in render(plan)


_AWKWARD = [
    (["--prompt", "caf\udce9"], "--prompt holds bytes that are no UTF-8 text"),
    (["--prompt", "x", "--output_directory", "d\0e"], "--output_directory holds bytes that are no UTF-8 text"),
    (["--dataset_path", "~nosuchuser/x.txt"], "--dataset_path ~nosuchuser/x.txt: there is no such user"),
    (["--prompt", "x", "--config", "~nosuchuser/x.yaml"], "--config ~nosuchuser/x.yaml: there is no such user"),
    (["--prompt", "x", "--model", "m" * 5000], "is neither a known model nor a folder"),
    (["--prompt", "x", "--model", "~nosuchuser/m"], "is neither a known model nor a folder"),
]


@pytest.mark.parametrize(("flags", "message"), _AWKWARD, ids=[message[:24] for _, message in _AWKWARD])
def test_awkward_text_is_one_line(flags: list[str], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse(["--model", "tiny", "--task", "t2v", *flags])
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "content", ["seed: 2026-13-45", "[" * 5000, f"seed: {'9' * 5000}"], ids=["date", "deep", "long"]
)
def test_awkward_yaml_is_one_line(content: str, tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(content)
    with pytest.raises(UsageError) as caught:
        parse(["--model", "tiny", "--task", "t2v", "--prompt", "x", "--config", str(path)])
    assert str(caught.value).startswith(f"--config {path}") or "--seed" in str(caught.value)


def test_a_prompt_with_bare_commas_is_not_cut(tmp_path: Path) -> None:
    path = tmp_path / "prompts.csv"
    path.write_text("prompt\na cat, dancing\n")
    with pytest.raises(UsageError, match="more fields in line 2 than columns"):
        parse(["--model", "tiny", "--task", "t2v", "--dataset_path", str(path)])
