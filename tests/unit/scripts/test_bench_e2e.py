"""The parts of bench_e2e.py: variants, shared weights, nested clocks, counted work, what is refused, the table."""

import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import bench_e2e
import e2e_report
import e2e_variants
import numpy as np
import pytest
import torch
from e2e_variants import Variant, Verified
from peers import xfuser_runner
from peers.peer import Made
from peers.sharing import rebuild, share_parts
from peers.work import CountedAttention, NestedClock, TimedCalls, Work, watch

from runner.config import RunConfig
from runner.distributed import start
from runner.engine import make_requests
from runner.errors import UsageError
from runner.metrics import Sample
from runner_models import find_recipe
from runner_models.ltx2.load import Parts, load, resolve

SIZE = ["--model", "tiny", "--height", "256", "--width", "256", "--num_frames", "17"]
CPU = torch.device("cpu")
VIDEO_TOKENS = [48] * 8 + [192] * 3
"""3 latent frames of 4x4 and of 8x8."""


@pytest.fixture(scope="module")
def parts() -> Parts:
    recipe = find_recipe("tiny")
    return load(resolve("tiny", recipe, load_format="auto"), recipe, device=CPU, dtype=torch.float32)


def _config(*flags: str) -> RunConfig:
    return bench_e2e.parse([*SIZE, *flags])[1]


def test_the_defaults_are_a_request_that_needs_nothing() -> None:
    arguments, config = bench_e2e.parse([])
    assert (config.model, config.load_format, config.task, config.num_iterations) == ("LTX-2.5", "dummy", "i2v", 3)
    assert Path(config.input_images[0]).name == "demo_cat.jpg"
    assert config.resize_input_images
    assert arguments.variants == ["ours"]
    tiny = bench_e2e.parse([*SIZE, "--task=t2v", "--num-iterations", "2", "--variants", "ours", "stock"])
    assert (tiny[1].load_format, tiny[1].input_images, tiny[1].num_iterations) == ("auto", (), 2)
    assert bench_e2e.parse(["--load_format", "auto"])[1].load_format == "auto"


def test_a_variant_has_options_of_its_own() -> None:
    variant = e2e_variants.parse_variant(
        "ours:vae_decode=tiled,use_torch_compile=true", _config(), world_size=1, gpus=0
    )
    assert (variant.config.vae_decode, variant.config.use_torch_compile) == ("tiled", True)
    assert variant.config.device == "cpu", "checked"


@pytest.mark.parametrize(
    ("spec", "part"),
    [
        ("theirs", "theirs is not known; allowed: ours, stock, xfuser"),
        ("ours:height=512", "height is not an option of a variant"),
        ("ours:vae_decode=titled", "did you mean tiled?"),
        ("ours:enable_tiling=maybe", "is not true or false"),
        ("ours:decode_chunk_frames=12", "is not a multiple of 8"),
        ("ours:vae_decode=[", "the value of vae_decode cannot be read"),
        ("ours:vae_decode=", "vae_decode has no value; write vae_decode=VALUE"),
    ],
)
def test_variants_that_cannot_be(spec: str, part: str) -> None:
    with pytest.raises(UsageError, match=part.replace("?", r"\?")):
        e2e_variants.parse_variant(spec, _config(), world_size=1, gpus=0)


@pytest.mark.parametrize(
    ("flags", "part"),
    [
        (["--variants", "theirs"], "theirs is not known"),
        (["--height", "300"], "--height 300"),
        (["--ulysses_degree", "2"], "--ulysses_degree 2"),
        (["--variant", "ours"], "--variant is not a flag"),
        (["--device", "cuda"], "torch sees none here"),
        (["--dry-run"], "--dry_run has no effect on this script"),
        (["--doctor"], "--doctor has no effect on this script"),
        (["--prompt", "a", "b"], "--prompt has 2 texts and this script times one request"),
    ],
)
def test_bad_usage_is_one_line(
    flags: list[str], part: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["bench_e2e.py", *SIZE, *flags])
    assert bench_e2e.main() == 2
    printed = capsys.readouterr()
    assert printed.err.startswith("error: ")
    assert part in printed.err
    assert not printed.out


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (KeyboardInterrupt(), 130, "error: interrupted\n"),
        (OSError(28, "No space left on device", "x.json"), 1, "error: [Errno 28] No space left on device: 'x.json'\n"),
    ],
    ids=["interrupted", "full"],
)
def test_an_end_from_outside_is_one_line(
    error: BaseException,
    code: int,
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(bench: Any) -> None:
        raise error

    monkeypatch.setattr(bench_e2e, "run", fail)
    monkeypatch.setattr(sys, "argv", ["bench_e2e.py", *SIZE, "--device", "cpu"])
    assert bench_e2e.main() == code
    assert capsys.readouterr().err.endswith(words)


def test_the_clock_counts_no_second_twice() -> None:
    clock = NestedClock(CPU)
    with clock("outer"):
        time.sleep(0.02)
        with clock("inner"):
            time.sleep(0.05)
        time.sleep(0.02)
    with pytest.raises(KeyError), clock("outer"):
        raise KeyError
    assert clock.seconds["inner"] == pytest.approx(0.05, abs=0.02)
    assert clock.seconds["outer"] == pytest.approx(0.04, abs=0.02)
    assert not clock._open


def test_calls_of_a_pipeline_are_stages() -> None:
    class Pipe:
        name = "theirs"

        def encode_prompt(self, text: str) -> str:
            time.sleep(0.02)
            return text

        def __call__(self, latents: int, *, prompt: str) -> str:
            return self.encode_prompt(prompt)

    clock = NestedClock(CPU)
    timed = TimedCalls(Pipe(), lambda: clock, lambda given: f"stage {given['prompt']}", prompts=True)
    assert timed(7, prompt="cat") == "cat"
    assert timed.given == (7,)
    assert timed.name == "theirs"
    assert clock.seconds["encode"] >= 0.02 > clock.seconds["stage cat"]


def test_shared_parts_have_the_tensors_and_not_the_hooks(parts: Parts) -> None:
    mine = share_parts(parts)
    for ours, other in (
        (parts.pipeline.transformer, mine.pipeline.transformer),
        (parts.diffusion_decoder, mine.diffusion_decoder),
        (parts.pipeline.vae, mine.pipeline.vae),
    ):
        assert ours is not other
        theirs = dict(other.named_parameters())
        assert all(parameter is theirs[name] for name, parameter in ours.named_parameters())
    mine.pipeline.transformer.register_forward_pre_hook(lambda *_: None)
    mine.diffusion_decoder.enable_tiling()
    assert not parts.pipeline.transformer._forward_pre_hooks
    assert not parts.diffusion_decoder.use_tiling
    assert mine.pipeline.scheduler is not parts.pipeline.scheduler


def test_rebuilt_modules_compute_the_same_on_the_same_tensors(parts: Parts) -> None:
    stock = parts.diffusion_decoder

    class Theirs(type(stock)):  # type: ignore[misc]
        pass

    other = rebuild(stock, Theirs)
    theirs = dict(other.named_parameters())
    assert type(other) is Theirs
    assert all(parameter is theirs[name] for name, parameter in stock.named_parameters())
    assert not any(tensor.is_meta for tensor in (*other.parameters(), *other.buffers()))
    assert not next(stock.parameters()).requires_grad, "as it was"

    class Wider(type(stock)):  # type: ignore[misc]
        def __init__(self, **config: Any) -> None:
            super().__init__()
            self.extra = torch.nn.Linear(2, 2)

    with pytest.raises(RuntimeError):
        rebuild(stock, Wider)


def test_work_is_counted_once_and_the_hooks_go(parts: Parts) -> None:
    class Attention(torch.nn.Module):
        kernel_size = (1, 1, 1)

        def __init__(self) -> None:
            super().__init__()
            self.to_q = torch.nn.Identity()

        def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
            return hidden_states

    class Transformer(torch.nn.Module):
        def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
            return hidden_states

    work, decoder, transformer = Work(), torch.nn.Sequential(Attention(), Attention()), Transformer()
    with watch(work, transformer=transformer, decoder=decoder):
        transformer(hidden_states=torch.zeros(1, 5, 8))
        decoder(torch.zeros(1, 2, 3, 4, 8))
    decoder(torch.zeros(1, 2, 3, 4, 8))
    attention = CountedAttention(lambda q, k: q, work)
    attention(torch.zeros(1, 2, 3, 4, 1, 8), None)
    assert work.to_json() == {"transformer_video_tokens": [5], "decoder_queries": 3 * 24}


def _verified(**changes: Any) -> Verified:
    frames = torch.randint(0, 255, (17, 256, 256, 3), dtype=torch.uint8)
    values: dict[str, Any] = {"frames": frames, "audio": torch.zeros(2, 100), "tokens": VIDEO_TOKENS} | changes
    work = Work(values["tokens"], 7, values.get("latents", torch.ones(4)))
    return Verified(values["frames"], values["audio"], work)


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({}, None),
        ({"latents": torch.ones(4) * 1.01}, None),
        ({"latents": -torch.ones(4)}, "its final latents are others: relative L2 2.0e+00"),
        ({"latents": torch.full((4,), torch.nan)}, "its final latents are not finite"),
        ({"tokens": VIDEO_TOKENS[1:]}, "the transformer's calls had"),
        ({"frames": None}, "no frames came"),
        ({"frames": torch.zeros(17, 256, 128, 3, dtype=torch.uint8)}, "frames have the shape (17, 256, 128, 3)"),
        ({"frames": torch.full((17, 256, 256, 3), 9, dtype=torch.uint8)}, "the frames are a constant"),
        ({"audio": torch.tensor([0.0, torch.nan])}, "the sound is empty or not finite"),
    ],
)
def test_what_is_not_timed(changes: dict[str, Any], part: str | None) -> None:
    config = _config()
    request = make_requests(config)[0]
    found, wrong = e2e_report.check_result(_verified(**changes), request, config, first=_verified(), leads=True)
    assert wrong is None if part is None else (wrong or "").startswith(part)
    if changes.get("tokens") is None:
        assert found["transformer_video_tokens"] == VIDEO_TOKENS


def test_rows_and_table() -> None:
    config = _config()
    timed = Variant("ours", "ours", {}, config, row={"work": {}}, to_file_seconds=[3.0])
    timed.samples = [
        Sample(0, 0, {"encode": 0.5, "stage1": 1.0}, (2**30, 2**31)),
        Sample(1, 0, {"encode": 0.5, "stage1": 2.0, "mux": 9.0}, (2**31, 2**30)),
    ]
    refused = Variant("xfuser", "xfuser", {}, config, row={"error": "ImportError: none here"})
    rows = e2e_report.rows([timed, refused, Variant("stock", "stock", {}, config)])
    assert [row["variant"] for row in rows] == ["ours", "xfuser"], "what was not begun has no row"
    assert (rows[0]["median_seconds"], rows[0]["min_seconds"], rows[0]["max_seconds"]) == (2.0, 1.5, 2.5)
    assert rows[0]["stages"]["mux"]["median_seconds"] == 9.0
    assert rows[0]["peak_gib_per_rank"] == [2.0, 2.0]
    head = {"device": "a CPU", "ranks": 1, "dtype": "float32", "weights_gib": 0.1, "load_seconds": 1.0}
    lines = e2e_report.table(head | {"config": config.to_json(), "rows": rows}).splitlines()
    assert lines[2].split()[:5] == ["ours", "2.00", "1.50", "2.50", "3.00"]
    assert lines[3].split(maxsplit=1) == ["xfuser", "ImportError: none here"]


class _FakeXfuser:
    """xfuser's runner class, as far as the adapter knows it: loads by from_pretrained, runs, saves."""

    def __init__(self, arguments: Any) -> None:
        self.config = arguments

    def preprocess_args(self, given: dict[str, Any]) -> dict[str, Any]:
        return dict(given)

    def initialize(self, arguments: dict[str, Any]) -> None:
        from diffusers import LTX2LatentUpsamplePipeline, LTX2Pipeline
        from diffusers.pipelines.ltx2.latent_upsampler import LTX2LatentUpsamplerModel
        from diffusers.pipelines.ltx2.pipeline_ltx2_diffusion_decode import LTX2VideoDiffusionDecodePipeline

        kinds = xfuser_runner._import()
        name = self.config.model
        transformer = kinds.Transformer.from_pretrained(name, subfolder="transformer")
        self.pipe = LTX2Pipeline.from_pretrained(name, transformer=transformer, torch_dtype=torch.bfloat16)
        upsampler = LTX2LatentUpsamplerModel.from_pretrained(name, subfolder="latent_upsampler")
        self.upsample_pipe = LTX2LatentUpsamplePipeline(vae=self.pipe.vae, latent_upsampler=upsampler)
        decoder = kinds.Decoder.from_pretrained(name, subfolder="diffusion_decoder")
        self.decode_pipe = LTX2VideoDiffusionDecodePipeline(diffusion_decoder=decoder, scheduler=self.pipe.scheduler)

    def run(self, arguments: dict[str, Any]) -> tuple[Any, list[float]]:
        self.decode_pipe("latents", generator=None)
        video = SimpleNamespace(frames=np.full((1, 2, 4, 4, 3), 0.5, np.float32), audio=torch.zeros(1, 2, 9))
        return SimpleNamespace(videos=[video]), [1.0]


def test_the_xfuser_adapter_gives_it_the_weights_in_memory(parts: Parts, monkeypatch: pytest.MonkeyPatch) -> None:
    transformer, decoder = type(parts.pipeline.transformer), type(parts.diffusion_decoder)
    kinds = SimpleNamespace(
        Args=lambda **given: SimpleNamespace(create_config=lambda: None, **given),
        Model=_FakeXfuser,
        Transformer=type("Transformer", (transformer,), {}),
        Decoder=type("Decoder", (decoder,), {}),
        init_distributed_environment=lambda: None,
    )
    monkeypatch.setattr(xfuser_runner, "_import", lambda: kinds)
    monkeypatch.setattr(xfuser_runner, "_environment", lambda: None)
    before = transformer.from_pretrained
    config = _config()
    with start() as session:
        request = make_requests(config)[0]
        peer = xfuser_runner.XfuserRunner(parts, config, request, session, tile=True)
    assert transformer.from_pretrained == before
    assert "from_pretrained" not in vars(kinds.Transformer)
    for ours, theirs, kind in (
        (parts.pipeline.transformer, peer.transformer, kinds.Transformer),
        (parts.diffusion_decoder, peer.decoder, kinds.Decoder),
    ):
        assert type(theirs) is kind
        own = dict(theirs.named_parameters())
        assert all(parameter is own[name] for name, parameter in ours.named_parameters())
    assert peer.model.config.input_images[0].size == (256, 256)
    assert (peer.model.config.enable_tiling, peer.model.config.use_parallel_vae) == (True, False)

    monkeypatch.setattr(peer.model.decode_pipe, "_pipe", lambda *_, **__: time.sleep(0.03))
    clock = NestedClock(CPU)
    made = peer.generate(clock)
    assert isinstance(made, Made)
    assert made.bytes().unique().tolist() == [128]
    assert peer.latents() == "latents"
    assert clock.seconds["video_decode"] >= 0.03 > clock.seconds["audio_decode"]
