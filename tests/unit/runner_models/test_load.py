"""Where a checkpoint comes from, and every way it can be missing."""

import shutil
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
import torch
from huggingface_hub import errors

from runner_models import find_recipe
from runner_models.api import SetupError
from runner_models.ltx2 import tiny
from runner_models.ltx2.build import COMPONENTS, PARAMETERS, build_component, component_config
from runner_models.ltx2.load import needed_folders, parameter_counts, resolve
from runner_models.ltx2.recipes import DISTILLED, FULL


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.tiny_checkpoint(tmp_path_factory.mktemp("cache"))


def _bytes(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_tiny_is_the_same_bytes_each_time(checkpoint: Path, tmp_path: Path) -> None:
    torch.manual_seed(123)
    state = torch.get_rng_state()
    again = tiny.tiny_checkpoint(tmp_path)
    assert _bytes(again) == _bytes(checkpoint)
    assert torch.equal(torch.get_rng_state(), state), "making it must not move the caller's random numbers"
    assert again.name == f"tiny-v{tiny.RECIPE_VERSION}"


def test_tiny_survives_a_second_maker_and_leaves_nothing_behind(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slower_maker(folder: Path) -> None:
        shutil.copytree(checkpoint, tmp_path / checkpoint.name)  # the other process is first
        folder.mkdir()
        (folder / "model_index.json").write_text("mine")

    monkeypatch.setattr(tiny, "_write_checkpoint", slower_maker)
    assert _bytes(tiny.tiny_checkpoint(tmp_path)) == _bytes(checkpoint)
    assert [path.name for path in tmp_path.iterdir()] == [checkpoint.name]


def test_an_interrupted_maker_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(folder: Path) -> None:
        folder.mkdir()
        (folder / "half").write_text("")
        raise KeyboardInterrupt

    monkeypatch.setattr(tiny, "_write_checkpoint", interrupted)
    with pytest.raises(KeyboardInterrupt):
        tiny.tiny_checkpoint(tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("damage", ["cut short", "deleted", "no index"])
def test_a_damaged_cache_is_made_again(damage: str, checkpoint: Path, tmp_path: Path) -> None:
    folder = tmp_path / checkpoint.name
    shutil.copytree(checkpoint, folder)
    weights = folder / "transformer" / "diffusion_pytorch_model.safetensors"
    if damage == "cut short":
        weights.write_bytes(weights.read_bytes()[:1000])
    else:
        (weights if damage == "deleted" else folder / "model_index.json").unlink()
    assert _bytes(tiny.tiny_checkpoint(tmp_path)) == _bytes(checkpoint)
    assert [path.name for path in tmp_path.iterdir()] == [checkpoint.name]


_DAMAGED = [
    ("vae/diffusion_pytorch_model.safetensors", b"version https://git-lfs", "is cut short, or a pointer"),
    ("vae/diffusion_pytorch_model.safetensors", None, "is cut short, or a pointer"),
    ("transformer/config.json", b"{", r"config\.json cannot be read"),
    ("vae/a.index.json", b'{"weight_map": {"x": "gone.safetensors"}}', r"lacks gone\.safetensors"),
]


@pytest.mark.parametrize(("name", "content", "message"), _DAMAGED, ids=["pointer", "cut", "config", "shard"])
def test_a_damaged_folder_is_one_line(
    name: str, content: bytes | None, message: str, checkpoint: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(checkpoint, folder)
    path = folder / name
    path.write_bytes(path.read_bytes()[:-1] if content is None else content)
    with pytest.raises(SetupError, match=message) as caught:
        resolve(str(folder), DISTILLED, load_format="auto")
    assert "\n" not in str(caught.value)


def test_parameter_tables_are_counted(checkpoint: Path) -> None:
    assert parameter_counts(checkpoint, DISTILLED) == pytest.approx(tiny.TINY_PARAMETERS)
    for name in COMPONENTS:
        module = build_component(name, component_config(name), device="meta", dtype=torch.bfloat16)
        assert sum(p.numel() for p in module.parameters()) == PARAMETERS[name], name
        assert {p.dtype for p in module.parameters()} == {torch.bfloat16}, name


@pytest.mark.parametrize("prompt", ["", "a cat", "élan 猫 🐈", "x" * 5000])
def test_the_stand_in_tokenizer_takes_any_prompt(prompt: str) -> None:
    tokens = tiny.stand_in_tokenizer()(prompt, padding="max_length", max_length=128, truncation=True)
    assert len(tokens.input_ids) == 128
    assert sum(tokens.attention_mask) >= 1, "an empty prompt still has <bos>"
    assert 3 not in tokens.input_ids, "no <unk>: bytes are the fallback"


def test_a_folder_is_checked_for_its_components(checkpoint: Path, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(checkpoint, folder)
    assert resolve(str(folder), DISTILLED, load_format="auto").folder == folder
    (folder / "vae" / "diffusion_pytorch_model.safetensors").rename(folder / "vae" / "pytorch_model.bin")
    with pytest.raises(SetupError, match=r"vae has no \.safetensors file"):
        resolve(str(folder), DISTILLED, load_format="auto")
    (folder / "vae" / "pytorch_model.bin").rename(folder / "vae" / "diffusion_pytorch_model.safetensors")
    shutil.rmtree(folder / "latent_upsampler")
    with pytest.raises(SetupError, match="has no latent_upsampler/"):
        resolve(str(folder), DISTILLED, load_format="auto")
    assert "latent_upsampler" not in needed_folders(FULL)


_HUB = [
    (errors.GatedRepoError, r"is gated: accept its terms at https://huggingface.co/Lightricks/.*HF_TOKEN"),
    (errors.RevisionNotFoundError, "--revision None is no commit or branch of Lightricks/LTX-2.5-Diffusers"),
    (errors.RepositoryNotFoundError, "was not found, or is not visible to this token: check HF_TOKEN"),
    (errors.LocalEntryNotFoundError, "is not in the local cache and the hub cannot be reached"),
    (errors.OfflineModeIsEnabled, "is not in the local cache and the hub cannot be reached"),
    (errors.HfHubHTTPError, "downloading Lightricks/LTX-2.5-Diffusers failed"),
    (OSError, "downloading Lightricks/LTX-2.5-Diffusers failed"),
]


@pytest.mark.parametrize(("kind", "message"), _HUB, ids=lambda value: getattr(value, "__name__", ""))
def test_hub_errors_say_what_to_do(kind: type[Exception], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        if issubclass(kind, errors.HfHubHTTPError):
            raise kind("no", response=SimpleNamespace(headers={}, request=None))
        raise kind("no")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(SetupError, match=message) as caught:
        resolve("LTX-2.5", DISTILLED, load_format="auto")
    assert "\n" not in str(caught.value)
    assert "--model /path/to" in str(caught.value) or kind is errors.RevisionNotFoundError


def test_only_what_is_needed_is_downloaded(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, list[str]] = {}

    def download(repository: str, *, allow_patterns: list[str], **options: object) -> str:
        asked[repository] = allow_patterns
        return str(checkpoint)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    source = resolve("LTX-2.5-full", FULL, load_format="auto")
    (patterns,) = asked.values()
    assert source.revision == checkpoint.name
    assert not source.random_weights
    assert "transformer_full/*.safetensors" in patterns
    assert not [p for p in patterns if p.startswith(("transformer/", "prompt_enhancer", "latent_upsampler"))]
    assert not [p for p in patterns if p.endswith((".bin", ".py", ".pt", ".ckpt", "*"))]


@pytest.mark.parametrize("model", ["tiny", "FOLDER"])
def test_dummy_refuses_a_checkpoint(model: str, checkpoint: Path) -> None:
    with pytest.raises(SetupError, match="--load_format dummy builds the released architecture"):
        resolve(model.replace("FOLDER", str(checkpoint)), DISTILLED, load_format="dummy")


_NAMES = [
    ("LTX-2.5", "distilled"),
    ("LTX-2.5-distilled", "distilled"),
    ("Lightricks/LTX-2.5-Diffusers", "distilled"),
    ("LTX-2.5-full", "full"),
    ("tiny", "distilled"),
    ("tiny-full", "full"),
]


@pytest.mark.parametrize(("model", "recipe"), _NAMES)
def test_registry(model: str, recipe: str) -> None:
    assert find_recipe(model).name == recipe


def test_a_folder_runs_either_recipe(checkpoint: Path) -> None:
    assert find_recipe(str(checkpoint)) is DISTILLED
    assert find_recipe(f"{checkpoint}:full") is FULL


def test_unknown_models_name_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"Did you mean LTX-2\.5-full\?"):
        find_recipe("ltx-2.5-ful")
    with pytest.raises(ValueError, match=r"folder without model_index\.json"):
        find_recipe(str(tmp_path))
