"""Every reason for which an attention is not taken, word for word."""

from types import SimpleNamespace

import pytest
import stand_ins
import torch
from stand_ins import choose, failing, package, refusal, target, with_aiter, with_natten

from layers.neighborhood_attention import builtin
from layers.neighborhood_attention.aiter import make_aiter
from layers.neighborhood_attention.natten import make_natten
from layers.neighborhood_attention.select import select_attention

pytestmark = pytest.mark.usefixtures("nothing_installed")

UNDEFINED = "/opt/libnatten.so: undefined symbol: _ZN3c105ErrorC2E"


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (ImportError(UNDEFINED), f"ImportError: {UNDEFINED}"),
        (OSError(UNDEFINED), f"OSError: {UNDEFINED}"),
        (
            ModuleNotFoundError("No module named 'einops'", name="einops"),
            "ModuleNotFoundError: No module named 'einops'",
        ),
        (RuntimeError("no driver\nand more"), "RuntimeError: no driver"),
        (AttributeError("torch has no x"), "AttributeError: torch has no x"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
@pytest.mark.parametrize(("name", "arch"), [("natten", "sm90"), ("aiter", "gfx950")])
def test_a_broken_import_is_not_called_absent(
    name: str,
    arch: str,
    error: Exception,
    words: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    failing(monkeypatch, name, error)
    assert refusal(caplog, name, arch) == f"installed, but its import failed: {words}"


def test_natten_without_na3d(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    package(monkeypatch, "natten", __version__="0.14.6")
    assert refusal(caplog, "natten") == "NATTEN 0.14.6 has no na3d (pip install -U natten)"


@pytest.mark.parametrize(("arch", "place"), [("sm75", "sm75"), ("gfx942", "gfx942"), ("cpu", "a CPU")])
@pytest.mark.parametrize("installed", [True, False])
def test_natten_architectures(
    arch: str, place: str, installed: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    if installed:
        with_natten(monkeypatch)
    assert refusal(caplog, "natten", arch) == f"needs an NVIDIA GPU, sm80 or newer; this is {place}"
    with pytest.raises(RuntimeError):
        make_natten(target(arch))


def test_aiter_probes_symbol_and_architecture(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    missing = "AITER 0.1.7 has no na3d_flash (needs a build with ROCm/aiter#5230)"
    assert refusal(caplog, "aiter", "gfx950") == "not installed (a build with ROCm/aiter#5230; see docs/backends.md)"
    with_aiter(monkeypatch, function=None)
    assert refusal(caplog, "aiter", "gfx950") == missing
    with pytest.raises(ImportError, match="has no na3d_flash"):
        make_aiter(target("gfx950"))
    package(monkeypatch, stand_ins.AITER_FUNCTION)
    assert refusal(caplog, "aiter", "gfx942") == missing
    with_aiter(monkeypatch)
    for arch in ("gfx90a", "sm90"):
        assert refusal(caplog, "aiter", arch) == f"needs gfx942 or gfx950 (MI300X, MI350X); this is {arch}"
        with pytest.raises(RuntimeError):
            make_aiter(target(arch))
    reason = refusal(caplog, "aiter", "gfx950", torch.float16)
    assert reason == "takes bfloat16 alone and this run is float16 (--dtype bf16)"


def test_aiter_whose_function_cannot_be_imported(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_aiter(monkeypatch)
    failing(monkeypatch, stand_ins.AITER_FUNCTION, OSError("undefined symbol: hipBlas"))
    wanted = "AITER 0.1.7 is installed, but its import failed: OSError: undefined symbol: hipBlas"
    assert refusal(caplog, "aiter", "gfx950") == wanted
    failing(monkeypatch, stand_ins.AITER_FUNCTION, ModuleNotFoundError("No module named 'flydsl'", name="flydsl"))
    assert "ModuleNotFoundError: No module named 'flydsl'" in refusal(caplog, "aiter", "gfx950")


def test_natten_from_the_hub(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def get_kernel(name: str, version: int):
        asked.append((name, version))
        return package(monkeypatch, "hub_natten", na3d=stand_ins.na3d)

    package(monkeypatch, "kernels", get_kernel=get_kernel)
    assert choose(caplog).describe()["detail"] == "sm90, shi-labs/natten of the hub"
    assert asked == [("shi-labs/natten", 1)]
    choose(caplog, "auto", "cpu", torch.float32)
    choose(caplog, "auto", "gfx942")
    assert len(asked) == 1, "nothing is fetched for a device that cannot use it"
    monkeypatch.setenv("DIFFUSERS_DISABLE_REMOTE_CODE", "yes")
    assert refusal(caplog, "natten") == (
        "not installed, and DIFFUSERS_DISABLE_REMOTE_CODE forbids the hub's shi-labs/natten (pip install natten, or "
        "unset it)"
    )
    assert len(asked) == 1


@pytest.mark.parametrize("case", ["offline", "no network", "404", "no build"])
def test_the_hub_does_not_have_it(case: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError

    response = SimpleNamespace(headers={}, request=None)
    error = {
        "no network": HfHubHTTPError.__bases__[0]("[Errno -2] Name or service not known"),
        "offline": LocalEntryNotFoundError("outgoing traffic has been disabled"),
        "404": RepositoryNotFoundError("404 Client Error", response=response),
        "no build": FileNotFoundError("Kernel at path does not have build variant: torch213-cpu"),
    }[case]

    def get_kernel(name: str, version: int):
        raise error

    package(monkeypatch, "kernels", get_kernel=get_kernel)
    reason = refusal(caplog, "natten")
    first = str(error).strip().splitlines()[0]
    assert reason == (
        f"not installed, and the hub's shi-labs/natten cannot be had: {type(error).__name__}: {first} (pip install "
        "natten, or see docs/backends.md)"
    )


def test_a_broken_kernels_package(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    failing(monkeypatch, "kernels", ImportError("cannot import name 'x'"))
    wanted = "not installed, and the import of kernels failed: ImportError: cannot import name 'x'"
    assert refusal(caplog, "natten") == wanted


@pytest.mark.parametrize(
    ("arch", "dtype", "reason"),
    [
        ("sm75", torch.bfloat16, "needs NVIDIA sm80 or newer, or gfx942 or gfx950; this is sm75"),
        ("gfx90a", torch.bfloat16, "needs NVIDIA sm80 or newer, or gfx942 or gfx950; this is gfx90a"),
        ("sm90", torch.float32, "takes bfloat16 and float16 and this run is float32 (--dtype bf16)"),
    ],
)
def test_triton_limits(arch: str, dtype: torch.dtype, reason: str, caplog: pytest.LogCaptureFixture) -> None:
    assert refusal(caplog, "triton", arch, dtype) == reason


def test_triton_not_installed_or_not_buildable(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing() -> str:
        raise RuntimeError("na3d_flash_attn needs Triton, which is not installed (pip install triton)")

    def broken(*_):
        raise TypeError("no such option")

    monkeypatch.setattr(builtin, "choose_config", broken)
    assert refusal(caplog, "triton") == "its schedules cannot be measured: TypeError: no such option"
    monkeypatch.setattr(builtin, "triton_version", missing)
    assert refusal(caplog, "triton") == "na3d_flash_attn needs Triton, which is not installed (pip install triton)"


def test_disabled_by_the_user(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    with_natten(monkeypatch)
    assert refusal(caplog, "natten", disabled=("natten",)) == "disabled by the user"
    with pytest.raises(ValueError, match="flex is not an attention of the decoder"):
        select_attention("auto", target(), disabled=("flex",))


def test_wrong_values_are_refused(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    with_natten(monkeypatch, lambda q, k, v, **rest: stand_ins.na3d(q, k.roll(1, 3), v.roll(1, 3), **rest))
    reason = refusal(caplog, "natten")
    assert reason.startswith("its self-test at kernel (3, 5, 5) is wrong: relative error 0.")
    assert reason.endswith(", allowed 2e-02")
    with_natten(monkeypatch, lambda q, k, v, **rest: stand_ins.na3d(q, k, v, **rest) * float("nan"))
    assert "relative error nan" in refusal(caplog, "natten")
    with_natten(monkeypatch, lambda q, k, v, **rest: stand_ins.na3d(q, k, v, **rest)[..., :8])
    assert "relative error inf" in refusal(caplog, "natten")
    with_natten(monkeypatch, lambda q, k, v, *, kernel_size, scale: stand_ins.na3d(q, k, v, kernel_size))
    assert "is wrong" in refusal(caplog, "natten"), "q scaled twice"


def test_every_kernel_size_is_tested(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    def only_small(q, k, v, *, kernel_size, scale):
        good = stand_ins.na3d(q, k, v, kernel_size, scale=scale)
        return good if kernel_size == (3, 5, 5) else good + 1

    with_natten(monkeypatch, only_small)
    arguments = ("sm90", torch.float16, ((3, 5, 5), (5, 3, 7)))
    assert refusal(caplog, "natten", *arguments).startswith("its self-test at kernel (5, 3, 7) is wrong")


@pytest.mark.parametrize("error", [RuntimeError("no kernel image"), ValueError("bad"), NotImplementedError("3-D")])
def test_a_kernel_that_raises_is_refused(
    error: Exception, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def raising(*_, **__):
        raise error

    with_natten(monkeypatch, raising)
    wanted = f"its self-test at kernel (3, 5, 5) failed: {type(error).__name__}: {error}"
    assert refusal(caplog, "natten") == wanted


def test_without_a_gpu_our_kernel_fails_its_self_test(caplog: pytest.LogCaptureFixture) -> None:
    """The real kernel on a device that only says it is an H200."""
    assert refusal(caplog, "triton").startswith("its self-test at kernel (3, 5, 5) failed: Unserved: na3d_flash_attn")
