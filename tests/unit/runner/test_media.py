"""Images in, mp4 out: pixel values, messages, and what a player would read from the file."""

import logging
import threading
from collections.abc import Callable, Iterator
from fractions import Fraction
from functools import partial
from http.server import HTTPServer, SimpleHTTPRequestHandler
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import torch
from PIL import Image

from runner.errors import UsageError
from runner.media import VideoWriter, load_image
from runner.sidecar import partial_path

HEIGHT, WIDTH, FRAMES = 96, 160, 25
SAMPLE_RATE = 48000


def same_size(path: Path | str, width: int, height: int) -> np.ndarray:
    return np.asarray(load_image(str(path), height=height, width=width, resize=False))


def grey16(mode: str) -> Image.Image:
    image = Image.new(mode, (4, 3), 257 * 100)
    image.putpixel((2, 1), 65535)
    return image


def palette(**save: Any) -> Image.Image:
    image = Image.new("P", (4, 3), 1)
    image.putpalette([0, 0, 0, 200, 100, 50, 10, 20, 30])
    image.putpixel((2, 1), 2)
    return image


def with_pixel(mode: str, fill: Any, pixel: Any) -> Image.Image:
    image = Image.new(mode, (4, 3), fill)
    image.putpixel((2, 1), pixel)
    return image


# name, image, file suffix, save options, colour everywhere, colour at (x=2, y=1)
MODES: list[tuple[str, Callable[[], Image.Image], str, dict[str, Any], tuple[int, ...], tuple[int, ...]]] = [
    ("RGB", partial(with_pixel, "RGB", (1, 2, 3), (9, 8, 7)), "png", {}, (1, 2, 3), (9, 8, 7)),
    ("L", partial(with_pixel, "L", 7, 200), "png", {}, (7, 7, 7), (200, 200, 200)),
    ("1", partial(with_pixel, "1", 1, 0), "png", {}, (255, 255, 255), (0, 0, 0)),
    ("LA", partial(with_pixel, "LA", (200, 255), (200, 51)), "png", {}, (200, 200, 200), (40, 40, 40)),
    ("RGBA", partial(with_pixel, "RGBA", (200, 100, 50, 0), (200, 100, 50, 51)), "png", {}, (0, 0, 0), (40, 20, 10)),
    (
        "RGB-key",
        partial(with_pixel, "RGB", (1, 2, 3), (9, 8, 7)),
        "png",
        {"transparency": (9, 8, 7)},
        (1, 2, 3),
        (0, 0, 0),
    ),
    ("P", palette, "png", {}, (200, 100, 50), (10, 20, 30)),
    ("P-key", palette, "png", {"transparency": 1}, (0, 0, 0), (10, 20, 30)),
    ("P-alpha", palette, "png", {"transparency": b"\xff\x33\xff"}, (40, 20, 10), (10, 20, 30)),
    ("P-gif", palette, "gif", {"transparency": 1}, (0, 0, 0), (10, 20, 30)),
    ("I;16", partial(grey16, "I;16"), "png", {}, (100, 100, 100), (255, 255, 255)),
    ("I;16-key", partial(grey16, "I;16"), "png", {"transparency": 65535}, (100, 100, 100), (0, 0, 0)),
    ("I;16B", partial(grey16, "I;16B"), "tiff", {}, (100, 100, 100), (255, 255, 255)),
    ("I-16bit", partial(with_pixel, "I", 25700, 65535), "tiff", {}, (100, 100, 100), (255, 255, 255)),
    ("I-8bit", partial(with_pixel, "I", 100, 255), "tiff", {}, (100, 100, 100), (255, 255, 255)),
    ("F-unit", partial(with_pixel, "F", 0.4, 1.0), "tiff", {}, (102, 102, 102), (255, 255, 255)),
    ("F-8bit", partial(with_pixel, "F", 100.4, 255.0), "tiff", {}, (100, 100, 100), (255, 255, 255)),
    ("CMYK", partial(with_pixel, "CMYK", (255, 0, 0, 0), (0, 0, 0, 0)), "tiff", {}, (0, 255, 255), (255, 255, 255)),
]


@pytest.mark.parametrize(
    ("make", "suffix", "options", "fill", "pixel"), [m[1:] for m in MODES], ids=[m[0] for m in MODES]
)
def test_image_modes(
    tmp_path: Path,
    make: Callable[[], Image.Image],
    suffix: str,
    options: dict[str, Any],
    fill: tuple[int, ...],
    pixel: tuple[int, ...],
) -> None:
    path = tmp_path / f"image.{suffix}"
    make().save(path, **options)
    expected = np.empty((3, 4, 3), dtype=np.uint8)
    expected[:] = fill
    expected[1, 2] = pixel
    np.testing.assert_array_equal(same_size(path, 4, 3), expected)


def test_float_range_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    Image.new("F", (4, 3), 0.5).save(tmp_path / "f.tiff")
    with caplog.at_level(logging.INFO, logger="runner.media"):
        same_size(tmp_path / "f.tiff", 4, 3)
    assert "read as 0..1" in caplog.text


ORIENTED: list[Callable[[np.ndarray], np.ndarray]] = [
    lambda a: a,
    np.fliplr,
    lambda a: np.rot90(a, 2),
    np.flipud,
    lambda a: a.transpose(1, 0, 2),
    lambda a: np.rot90(a, -1),
    lambda a: np.rot90(a, 2).transpose(1, 0, 2),
    np.rot90,
]


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("suffix", ["png", "tiff"])
def test_exif_orientation(tmp_path: Path, orientation: int, suffix: str) -> None:
    stored = np.random.default_rng(0).integers(0, 256, (3, 5, 3), dtype=np.uint8)
    exif = Image.Exif()
    exif[0x0112] = orientation
    Image.fromarray(stored).save(tmp_path / f"o.{suffix}", exif=exif)
    expected = ORIENTED[orientation - 1](stored)
    np.testing.assert_array_equal(same_size(tmp_path / f"o.{suffix}", expected.shape[1], expected.shape[0]), expected)


# Source width x height, target width x height: up, down, crops on either axis, odd, prime, extreme.
CROPS = [
    (101, 67, 64, 64),
    (67, 101, 96, 32),
    (900, 700, 768, 512),
    (900, 700, 352, 512),
    (33, 200, 97, 31),
    (2, 2, 65, 33),
]


@pytest.mark.parametrize("sizes", CROPS, ids="{0[0]}x{0[1]}-{0[2]}x{0[3]}".format)
def test_resize_covers_and_crops_the_centre(tmp_path: Path, sizes: tuple[int, int, int, int]) -> None:
    source_width, source_height, width, height = sizes
    ramp = np.zeros((source_height, source_width, 3))
    ramp[..., 0] = np.linspace(0, 255, source_width)
    ramp[..., 1] = np.linspace(0, 255, source_height)[:, None]
    Image.fromarray(np.rint(ramp).astype(np.uint8)).save(tmp_path / "ramp.png")
    image = load_image(str(tmp_path / "ramp.png"), height=height, width=width, resize=True)
    assert (image.mode, image.size) == ("RGB", (width, height))
    out = np.asarray(image).astype(float)

    step = min(source_width / width, source_height / height)  # source pixels per output pixel, equal on both axes
    for axis, (n, source_n) in enumerate([(width, source_width), (height, source_height)]):
        position = (source_n - step * n) / 2 + (np.arange(n) + 0.5) * step - 0.5
        expected = position.clip(0, source_n - 1) / (source_n - 1) * 255
        got = out[..., axis].mean(axis=axis)
        # 1.5 levels inside: rounding of the ramp and of the result. Lanczos bends a ramp at the image's own border.
        inside = (position >= 3 * max(step, 1)) & (position <= source_n - 1 - 3 * max(step, 1))
        np.testing.assert_allclose(got[inside], expected[inside], atol=1.5)
        np.testing.assert_allclose(got, expected, atol=255 / (source_n - 1) * max(step, 1) + 1.5)


def test_resize_leaves_no_border(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    for width, height, new_width, new_height in rng.integers(2, 130, (300, 4)).tolist():
        Image.new("RGB", (width, height), (255, 254, 253)).save(tmp_path / "c.bmp")
        image = load_image(str(tmp_path / "c.bmp"), height=new_height, width=new_width, resize=True)
        assert image.size == (new_width, new_height)
        assert image.getextrema() == ((255, 255), (254, 254), (253, 253))


def test_right_size_is_not_resampled(tmp_path: Path) -> None:
    stored = np.random.default_rng(2).integers(0, 256, (33, 65, 3), dtype=np.uint8)
    Image.fromarray(stored).save(tmp_path / "same.png")
    image = load_image(str(tmp_path / "same.png"), height=33, width=65, resize=True)
    np.testing.assert_array_equal(np.asarray(image), stored)


def bad_files(folder: Path) -> dict[str, tuple[Path, str]]:
    """name -> (path, the message's words)"""
    paths = {name: folder / f"{name}.png" for name in ("missing", "text", "empty", "truncated", "dot", "other", "hdr")}
    paths["text"].write_text("not a picture")
    paths["empty"].touch()
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8))
    noise.save(paths["truncated"])
    paths["truncated"].write_bytes(paths["truncated"].read_bytes()[:3000])
    noise.save(folder / "cut.jpg")
    (folder / "cut.jpg").write_bytes((folder / "cut.jpg").read_bytes()[:1000])
    Image.new("RGB", (1, 1)).save(paths["dot"])
    Image.new("RGB", (40, 20)).save(paths["other"])
    Image.new("F", (64, 64), 1e6).save(paths["hdr"], format="tiff")
    return {
        "missing": (
            paths["missing"],
            r"cannot be read \(No such file or directory\); give an image file or an http\(s\) URL",
        ),
        "folder": (folder, r"cannot be read \(Is a directory\); give an image file"),
        "text": (paths["text"], r"is not an image that Pillow can read; give a png, jpeg or webp file"),
        "empty": (paths["empty"], r"is not an image that Pillow can read"),
        "truncated": (paths["truncated"], r"is damaged or truncated \(.+\); give a complete png, jpeg or webp file"),
        "truncated-jpeg": (folder / "cut.jpg", r"is damaged or truncated \(.+\)"),
        "1x1": (paths["dot"], r"is 1x1 pixels; the smallest allowed is 2x2"),
        "size": (paths["other"], r"is 40x20 \(width x height\) and the video is 64x64; add --resize_input_images"),
        "range": (paths["hdr"], r"has grey values 1e\+06 to 1e\+06, allowed are 0 to 65535"),
    }


@pytest.mark.parametrize(
    "name", ["missing", "folder", "text", "empty", "truncated", "truncated-jpeg", "1x1", "size", "range"]
)
def test_bad_image(tmp_path: Path, name: str) -> None:
    path, words = bad_files(tmp_path)[name]
    with pytest.raises(UsageError, match=words) as caught:
        load_image(str(path), height=64, width=64, resize=False)
    assert str(caught.value).startswith(f"--input_images {path}")
    assert "\n" not in str(caught.value)


def test_decompression_bomb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Image.new("RGB", (40, 20)).save(tmp_path / "bomb.png")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 300)
    with pytest.raises(UsageError, match=r"is too large \(.*800 pixels.*\); give a smaller image"):
        load_image(str(tmp_path / "bomb.png"), height=20, width=40, resize=True)


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, format: str, *args: Any) -> None:
            pass

    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    httpd = HTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(tmp_path)))
    thread = threading.Thread(target=partial(httpd.serve_forever, poll_interval=0.02))
    thread.start()
    yield f"http://127.0.0.1:{httpd.server_port}"
    httpd.shutdown()
    thread.join()
    httpd.server_close()


def test_url(tmp_path: Path, server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stored = np.random.default_rng(3).integers(0, 256, (4, 6, 3), dtype=np.uint8)
    Image.fromarray(stored).save(tmp_path / "web.png")
    np.testing.assert_array_equal(same_size(f"{server}/web.png", 6, 4), stored)
    with pytest.raises(
        UsageError, match=r"--input_images http\S+/no.png could not be fetched \(404 .*\); check the URL"
    ):
        load_image(f"{server}/no.png", height=4, width=6, resize=False)
    monkeypatch.setattr("runner.media.MAX_DOWNLOAD_BYTES", 10)
    with pytest.raises(UsageError, match="is larger than 0 MiB"):
        load_image(f"{server}/web.png", height=4, width=6, resize=False)


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("http://127.0.0.1:9/x.png", r"could not be fetched \(.+\); check the URL or give a file"),
        ("s3://bucket/x.png", r"s3:// is not supported; give an image file or an http\(s\) URL"),
    ],
)
def test_bad_url(url: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with pytest.raises(UsageError, match=words):
        load_image(url, height=4, width=6, resize=False)


def test_demo_image() -> None:
    """The demo's picture is not of the demo's size, so it takes the resize."""
    path = Path(__file__).parents[3] / "docs" / "assets" / "demo_cat.jpg"
    assert load_image(str(path), height=512, width=768, resize=True).size == (768, 512)
    with pytest.raises(UsageError, match="is 900x700"):
        load_image(str(path), height=512, width=768, resize=False)


def smooth_clip(frames: int = FRAMES) -> torch.Tensor:
    """Colours that differ by channel and place: a swapped channel, matrix or range costs far more than coding does."""
    t = torch.arange(frames).view(-1, 1, 1) / frames
    y = torch.arange(HEIGHT).view(1, -1, 1) / HEIGHT
    x = torch.arange(WIDTH).view(1, 1, -1) / WIDTH
    red, green, blue = (
        0.5 + 0.5 * torch.sin(6 * x + 2 * t),
        0.05 + 0.9 * y,
        0.5 + 0.5 * torch.cos(5 * y + 3 * x - 2 * t),
    )
    return torch.stack(torch.broadcast_tensors(red, green, blue), -1).mul(255).round().to(torch.uint8)


def tone(seconds: float, channels: int = 1, sample_rate: int = SAMPLE_RATE) -> torch.Tensor:
    wave = 0.5 * torch.sin(2 * torch.pi * 440 * torch.arange(round(seconds * sample_rate)) / sample_rate)
    return torch.stack([wave, -0.5 * wave][:channels])


def encode(path: Path, frames: torch.Tensor, *, chunks: int | None = None, **kwargs: Any) -> Path:
    options = {"height": HEIGHT, "width": WIDTH, "frame_rate": 24} | kwargs
    with VideoWriter(path, **options) as writer:
        for chunk in frames.split(chunks or len(frames)):
            writer.write(chunk)
    assert writer.frames_written == len(frames)
    return path


def decode_rgb(path: Path) -> np.ndarray:
    """(F, H, W, 3) in 0..255 by BT.709's own formulas, independent of the library's colour conversion."""
    with av.open(str(path)) as container:
        planes = np.stack([frame.to_ndarray() for frame in container.decode(video=0)]).astype(np.float64)
    y = (planes[:, :HEIGHT] - 16) * (255 / 219)
    chroma = planes[:, HEIGHT:].reshape(-1, 2, HEIGHT // 2, WIDTH // 2).repeat(2, axis=2).repeat(2, axis=3)
    cb, cr = ((chroma - 128) * (255 / 224)).swapaxes(0, 1)
    return np.stack([y + 1.5748 * cr, y - 0.1873 * cb - 0.4681 * cr, y + 1.8556 * cb], -1).clip(0, 255)


def test_colours_survive(tmp_path: Path) -> None:
    frames = smooth_clip()
    error = decode_rgb(encode(tmp_path / "v.mp4", frames)) - frames.numpy()
    assert 10 * np.log10(255**2 / np.mean(error**2)) > 40


@pytest.mark.parametrize("frame_rate", [24, 23.976, 24000 / 1001, 12.5, 60, Fraction(30000, 1001)], ids=str)
@pytest.mark.parametrize("seconds", [0.3, 1.5], ids=["short-sound", "long-sound"])
def test_what_a_player_reads(tmp_path: Path, frame_rate: float | Fraction, seconds: float) -> None:
    path = encode(
        tmp_path / "v: %d.mp4", smooth_clip(), frame_rate=frame_rate, audio=tone(seconds), audio_sample_rate=SAMPLE_RATE
    )
    data = path.read_bytes()
    assert 0 < data.index(b"moov") < data.index(b"mdat"), "not faststart"
    rate = Fraction(frame_rate).limit_denominator(1001)
    with av.open(f"file:{path}") as container:
        video, sound = container.streams.video[0], container.streams.audio[0]
        assert (video.codec_context.name, video.codec_context.pix_fmt) == ("h264", "yuv420p")
        assert (video.width, video.height, video.frames) == (WIDTH, HEIGHT, FRAMES)
        assert video.average_rate == rate
        assert video.duration is not None
        assert video.time_base is not None
        assert video.duration * video.time_base == FRAMES / rate
        context = video.codec_context
        # 1 is bt709 in all three tables, and limited range.
        assert (context.colorspace, context.color_primaries, context.color_trc, context.color_range) == (1, 1, 1, 1)
        assert (sound.codec_context.name, sound.sample_rate, sound.codec_context.layout.name) == (
            "aac",
            48000,
            "stereo",
        )
        assert sound.duration is not None
        assert sound.time_base is not None
        assert abs(sound.duration * sound.time_base - FRAMES / rate) <= 1 / rate
        times = [
            frame.pts * frame.time_base
            for frame in container.decode(video=0)
            if frame.pts is not None and frame.time_base
        ]
        assert times == [i / rate for i in range(FRAMES)]


@pytest.mark.parametrize("channels", [1, 2], ids=["mono", "stereo"])
@pytest.mark.parametrize("sample_rate", [16000, 24000, 48000])
def test_sound_is_in_place(tmp_path: Path, channels: int, sample_rate: int) -> None:
    """Same time, same channel, silence where the sound ends before the video."""
    wave = tone(0.5, channels, sample_rate)
    path = encode(tmp_path / "v.mp4", smooth_clip(), audio=wave, audio_sample_rate=sample_rate)
    with av.open(str(path)) as container:
        decoded = np.concatenate([frame.to_ndarray() for frame in container.decode(audio=0)], axis=1)
    assert 0 <= decoded.shape[1] - round(FRAMES / 24 * sample_rate) < 1024
    inside = slice(2048, wave.shape[1] - 2048)
    expected = wave.expand(2, -1).numpy()
    np.testing.assert_allclose(decoded[:, inside], expected[:, inside], atol=0.05)
    assert np.abs(decoded[:, wave.shape[1] + 2048 :]).max() < 1e-3


def test_no_sound(tmp_path: Path) -> None:
    with av.open(str(encode(tmp_path / "v.mp4", smooth_clip(3)))) as container:
        assert [stream.type for stream in container.streams] == ["video"]


def test_same_bytes_however_chunked(tmp_path: Path) -> None:
    frames = smooth_clip(49)  # 160 pixels wide: not a multiple of 256, where AVX-512 would not repeat itself
    make = partial(encode, frames=frames, audio=tone(3, 2), audio_sample_rate=SAMPLE_RATE)
    whole = make(tmp_path / "a.mp4").read_bytes()
    assert make(tmp_path / "b.mp4").read_bytes() == whole
    assert make(tmp_path / "c.mp4", chunks=1).read_bytes() == whole
    assert make(tmp_path / "d.mp4", chunks=8).read_bytes() == whole
    strided = frames.permute(0, 3, 1, 2).contiguous().permute(0, 2, 3, 1)
    assert make(tmp_path / "e.mp4", frames=strided).read_bytes() == whole


BAD_WRITES: list[tuple[str, dict[str, Any], torch.Tensor | None, str]] = [
    ("odd", {"height": 95}, None, "even height and width, got 160x95"),
    ("rate-0", {"frame_rate": 0}, None, "frame_rate 0 is not at least"),
    ("rate-nan", {"frame_rate": float("nan")}, None, "frame_rate nan is not at least"),
    ("rate-low", {"frame_rate": 1e-5}, None, "frame_rate 1e-05 is not at least 1/1001 frames per second"),
    ("nan", {"audio": torch.tensor([[0.0, float("nan"), float("inf")]])}, None, "2 of 3 audio samples are not finite"),
    ("three-channels", {"audio": torch.zeros(3, 9)}, None, r"expected a float waveform \(1 or 2, N\)"),
    ("sample-rate", {"audio": torch.zeros(1, 9), "audio_sample_rate": 12345}, None, r"12345 is not of AAC's \(7350, "),
    (
        "no-sample-rate",
        {"audio": torch.zeros(1, 9), "audio_sample_rate": 0},
        None,
        "audio_sample_rate 0 is not",
    ),
    ("no-frames", {}, None, "no frame was written"),
    ("float", {}, torch.zeros(1, HEIGHT, WIDTH, 3), "expected uint8 frames"),
    ("swapped", {}, torch.zeros(1, WIDTH, HEIGHT, 3, dtype=torch.uint8), r"expected uint8 frames \(F, 96, 160, 3\)"),
]


@pytest.mark.parametrize(("options", "frames", "words"), [b[1:] for b in BAD_WRITES], ids=[b[0] for b in BAD_WRITES])
def test_bad_write_leaves_nothing(
    tmp_path: Path, options: dict[str, Any], frames: torch.Tensor | None, words: str
) -> None:
    path = tmp_path / "v.mp4"
    partial_path(path).touch()  # a reservation, as output_path makes it
    options = {"height": HEIGHT, "width": WIDTH, "frame_rate": 24, "audio_sample_rate": SAMPLE_RATE} | options
    chunks = [] if frames is None else [smooth_clip(2), frames]

    def run() -> None:
        with VideoWriter(path, **options) as writer:
            for chunk in chunks:
                writer.write(chunk)

    with pytest.raises(ValueError, match=words):
        run()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_failure_keeps_the_old_file(tmp_path: Path, error: type[BaseException]) -> None:
    path = tmp_path / "v.mp4"
    path.write_bytes(b"old")

    def interrupted() -> None:
        with VideoWriter(path, height=HEIGHT, width=WIDTH, frame_rate=24) as writer:
            writer.write(smooth_clip(3))
            assert path.read_bytes() == b"old", "written in place"
            raise error

    with pytest.raises(error):
        interrupted()
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == {"v.mp4": b"old"}


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_full_disk(tmp_path: Path) -> None:
    path = tmp_path / "v.mp4"
    partial_path(path).symlink_to("/dev/full")
    with pytest.raises(OSError, match=r"cannot write the video: No space left on device: '.*v\.mp4'"):
        encode(path, smooth_clip(), audio=tone(1), audio_sample_rate=SAMPLE_RATE)
    assert list(tmp_path.iterdir()) == []


def test_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="cannot write the video"):
        encode(tmp_path / "no" / "v.mp4", smooth_clip(2))
