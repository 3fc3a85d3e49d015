"""Images in, mp4 with sound out. Layouts: F frames, H height, W width, C channels, N samples."""

import logging
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from fractions import Fraction
from io import BytesIO
from pathlib import Path
from typing import Any, Self

import av
import numpy as np
import requests
import torch
import urllib3
from av.video.reformatter import ColorPrimaries, ColorRange, Colorspace, ColorTrc, Interpolation, VideoReformatter
from PIL import Image, ImageOps

from runner.errors import UsageError, user_path
from runner.sidecar import partial_path

logger = logging.getLogger(__name__)

MAX_DOWNLOAD_BYTES = 256 * 2**20
CONNECT_TIMEOUT_S, READ_TIMEOUT_S = 10, 60

AUDIO_BIT_RATE = 192_000
AAC_SAMPLE_RATES = (7350, 8000, 11025, 12000, 16000, 22050, 24000, 32000, 44100, 48000, 64000, 88200, 96000)
# x264's output depends on its number of threads, so it is fixed and not the machine's core count.
VIDEO_THREADS = 8
# x264 (core 165) with AVX-512 gives another file each time at widths of 160 and 960, not at 256 and 768: its macroblock
# tree depends on more than the input. With AVX2 it repeats itself, gives the same bytes where AVX-512 did, and is as
# fast (960x544x25: 0.55 s both, 2026-11-30). Asked for only where AVX-512 is present: every such machine has all these.
AVX2_FEATURES = "MMX2,SSE2Fast,LZCNT,SSE4.2,AVX,FMA3,BMI2,AVX2"


def load_image(path_or_url: str, *, height: int, width: int, resize: bool) -> Image.Image:
    """Read the first frame of an i2v request as RGB of exactly `width` x `height` pixels.

    The EXIF orientation is applied, transparency is laid over black. 16-bit grey is divided by 257; float and 32-bit
    grey is read as 0..1 (float), 0..255 or 0..65535, the first that holds its maximum.

    Args:
        path_or_url: a file or an http(s) URL, the value of --input_images.
        height, width: the wanted size in pixels.
        resize: scale to cover that size and crop the centre (Lanczos, in one resampling of the exact fractional box, so
            no border can appear); otherwise another size is an error.

    Raises:
        UsageError: the image cannot be read, is smaller than 2x2, or has another size and `resize` is off.
    """
    name = f"--input_images {path_or_url}"
    source = _fetch(path_or_url, name)
    try:
        with Image.open(source) as opened:
            stored = ImageOps.exif_transpose(opened)
    except Image.UnidentifiedImageError as error:
        raise UsageError(f"{name} is not an image that Pillow can read; give a png, jpeg or webp file") from error
    except Image.DecompressionBombError as error:
        raise UsageError(f"{name} is too large ({error}); give a smaller image") from error
    # What Pillow's decoders raise on damaged files: each format has its own choice.
    except (OSError, SyntaxError, ValueError, EOFError, RuntimeError, struct.error) as error:
        raise UsageError(f"{name} is damaged or truncated ({error}); give a complete png, jpeg or webp file") from error
    image = _to_rgb(stored, name)
    if min(image.size) < 2:
        raise UsageError(f"{name} is {image.width}x{image.height} pixels; the smallest allowed is 2x2")
    if image.size == (width, height):
        return image
    if not resize:
        raise UsageError(
            f"{name} is {image.width}x{image.height} (width x height) and the video is {width}x{height}; "
            "add --resize_input_images to scale and crop it, or give an image of that size"
        )
    return ImageOps.fit(image, (width, height), Image.Resampling.LANCZOS)


def _fetch(path_or_url: str, name: str) -> BytesIO:
    scheme, separator, _ = path_or_url.partition("://")
    if not separator:
        try:
            return BytesIO(user_path(path_or_url, name).read_bytes())
        except OSError as error:
            reason = error.strerror
            raise UsageError(f"{name} cannot be read ({reason}); give an image file or an http(s) URL") from error
    if scheme.lower() not in ("http", "https"):
        raise UsageError(f"{name}: {scheme}:// is not supported; give an image file or an http(s) URL")
    try:
        with requests.get(path_or_url, timeout=(CONNECT_TIMEOUT_S, READ_TIMEOUT_S), stream=True) as response:
            response.raise_for_status()
            data = BytesIO()
            for block in response.iter_content(2**16):
                data.write(block)
                if data.tell() > MAX_DOWNLOAD_BYTES:
                    raise UsageError(f"{name} is larger than {MAX_DOWNLOAD_BYTES // 2**20} MiB; give a smaller image")
    except (requests.RequestException, urllib3.exceptions.HTTPError) as error:
        raise UsageError(f"{name} could not be fetched ({error}); check the URL or give a file") from error
    data.seek(0)
    return data


def _to_rgb(image: Image.Image, name: str) -> Image.Image:
    if image.mode == "F" or image.mode.startswith("I"):
        return _grey_to_rgb(image, name)
    if image.has_transparency_data:
        rgba = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", image.size, "black"), rgba).convert("RGB")
    return image.convert("RGB")


def _grey_to_rgb(image: Image.Image, name: str) -> Image.Image:
    """Pillow clips these modes at 255 instead of scaling them."""
    grey_HW = np.asarray(image).astype(np.float64)
    low, high = float(grey_HW.min()), float(grey_HW.max())
    if not (low >= 0 and high <= 65535):
        raise UsageError(f"{name} has grey values {low:g} to {high:g}, allowed are 0 to 65535; save it as 8-bit RGB")
    if image.mode.startswith("I;16"):
        full = 65535
    else:
        full = next(full for full in ((1, 255, 65535) if image.mode == "F" else (255, 65535)) if high <= full)
        logger.info("%s: %s grey values up to %g are read as 0..%d", name, image.mode, high, full)
    transparent = image.info.get("transparency")
    if transparent is not None:
        grey_HW[grey_HW == transparent] = 0
    return Image.fromarray(np.rint(grey_HW * (255 / full)).astype(np.uint8)).convert("RGB")


class VideoWriter:
    """Encode frames as they come into an mp4: H.264 yuv420p (bt709, limited range, crf 12), AAC stereo, faststart.

        with VideoWriter(path, height=512, width=768, frame_rate=24, audio=waveform, audio_sample_rate=48000) as writer:
            for frames in chunks:
                writer.write(frames)

    The file is written as `partial_path(path)` and renamed on leaving the block; any exception removes it. Sound is cut
    or padded with silence to the length of the frames written, and keeps its sample rate. The same input gives the same
    bytes, however it is split into chunks. Not thread-safe: one thread writes.

    Args:
        path: the .mp4, best from `runner.sidecar.output_path`; an existing file is replaced.
        height, width: frame size in pixels, both even.
        frame_rate: frames per second; kept as the nearest fraction with a denominator up to 1001.
        audio: (C, N) float waveform with one or two channels, values in [-1, 1] (clamped); None for no sound.
        audio_sample_rate: samples per second, one of AAC_SAMPLE_RATES; not looked at without sound.

    Raises, on entering, writing and leaving: ValueError for sizes, rates, shapes, dtypes, sound that is not finite, no
    frame at all; OSError when the file cannot be written, e.g. the disk is full.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        height: int,
        width: int,
        frame_rate: float | Fraction,
        audio: torch.Tensor | None = None,
        audio_sample_rate: int = 0,
    ) -> None:
        self.path = Path(path)
        self.height, self.width = height, width
        self.frames_written = 0
        self.frame_rate, self.audio, self.audio_sample_rate = frame_rate, audio, audio_sample_rate
        self._partial = partial_path(self.path)
        self._container: Any = None
        self._reformatter = VideoReformatter()
        self._audio_CN: np.ndarray | None = None
        self._samples_written = 0

    def __enter__(self) -> Self:
        with self._discard_on_error():
            self._open()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self._discard()
            return
        with self._discard_on_error():
            self._finish()

    def write(self, frames_FHWC: torch.Tensor) -> None:
        """Encode (F, H, W, 3) uint8 frames, on any device, that follow those already written."""
        if frames_FHWC.dtype != torch.uint8 or tuple(frames_FHWC.shape[1:]) != (self.height, self.width, 3):
            raise ValueError(
                f"expected uint8 frames (F, {self.height}, {self.width}, 3), "
                f"got {frames_FHWC.dtype} {tuple(frames_FHWC.shape)}"
            )
        assert self._container is not None, "write() outside the with block"
        with self._os_errors():
            for pixels_HWC in frames_FHWC.detach().cpu().contiguous().numpy():
                rgb = av.VideoFrame.from_ndarray(pixels_HWC, format="rgb24")
                frame = self._reformatter.reformat(
                    rgb,
                    format="yuv420p",
                    dst_colorspace=Colorspace.ITU709,
                    src_color_range=ColorRange.JPEG,
                    dst_color_range=ColorRange.MPEG,
                    interpolation=Interpolation.BICUBIC | Interpolation.FULL_CHR_H_INP | Interpolation.ACCURATE_RND,
                    threads=1,
                )
                frame.pts, frame.time_base = self.frames_written, 1 / self._rate
                self._container.mux(self._video.encode(frame))
                self.frames_written += 1
                self._encode_audio()

    def _open(self) -> None:
        if self.height % 2 or self.width % 2 or min(self.height, self.width) < 2:
            raise ValueError(f"yuv420p needs an even height and width, got {self.width}x{self.height} (width x height)")
        self._rate = _frame_rate(self.frame_rate)
        if self.audio is not None:
            self._audio_CN = _stereo(self.audio)
            if self.audio_sample_rate not in AAC_SAMPLE_RATES:
                raise ValueError(f"audio_sample_rate {self.audio_sample_rate} is not of AAC's {AAC_SAMPLE_RATES}")
        x264_options = {"crf": "12"}
        if torch.backends.cpu.get_cpu_capability().startswith("AVX512"):
            x264_options["x264-params"] = f"asm={AVX2_FEATURES}"
        with self._os_errors():
            # "file:" keeps a colon in the name from being read as a protocol.
            url = f"file:{self._partial.absolute()}"
            self._container = av.open(url, "w", format="mp4", container_options={"movflags": "+faststart"})
            self._video = self._container.add_stream("libx264", rate=self._rate, options=x264_options)
            self._video.height, self._video.width, self._video.pix_fmt = self.height, self.width, "yuv420p"
            context = self._video.codec_context
            context.time_base = 1 / self._rate
            context.thread_count, context.thread_type = VIDEO_THREADS, "FRAME"
            context.color_range, context.colorspace = ColorRange.MPEG, 1  # AVCOL_SPC_BT709
            context.color_primaries, context.color_trc = ColorPrimaries.BT709, ColorTrc.BT709
            if self._audio_CN is not None:
                self._sound = self._container.add_stream("aac", rate=self.audio_sample_rate, layout="stereo")
                self._sound.codec_context.bit_rate = AUDIO_BIT_RATE
                self._sound.codec_context.time_base = Fraction(1, self.audio_sample_rate)

    def _encode_audio(self) -> None:
        """Encode the sound that belongs to the frames written so far; PyAV regroups it into AAC's frames."""
        if self._audio_CN is None:
            return
        start, end = self._samples_written, round(self.frames_written / self._rate * self.audio_sample_rate)
        if start == end:
            return
        block_CN = np.zeros((2, end - start), dtype=np.float32)
        sound_CN = self._audio_CN[:, start:end]
        block_CN[:, : sound_CN.shape[1]] = sound_CN
        frame = av.AudioFrame.from_ndarray(block_CN, format="fltp", layout="stereo")
        frame.sample_rate, frame.pts, frame.time_base = (
            self.audio_sample_rate,
            start,
            Fraction(1, self.audio_sample_rate),
        )
        self._container.mux(self._sound.encode(frame))
        self._samples_written = end

    def _finish(self) -> None:
        if not self.frames_written:
            raise ValueError(f"no frame was written to {self.path}")
        with self._os_errors():
            self._container.mux(self._video.encode(None))
            if self._audio_CN is not None:
                self._container.mux(self._sound.encode(None))
            self._container.close()
        os.replace(self._partial, self.path)

    def _discard(self) -> None:
        if self._container is not None:
            # The error that led here is the one to report; closing a broken file often fails again.
            with suppress(av.error.FFmpegError):
                self._container.close()
        self._partial.unlink(missing_ok=True)

    @contextmanager
    def _discard_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self._discard()
            raise

    @contextmanager
    def _os_errors(self) -> Iterator[None]:
        try:
            yield
        except av.error.FFmpegError as error:
            raise OSError(error.errno, f"cannot write the video: {error.strerror}", str(self.path)) from error


def _frame_rate(value: float | Fraction) -> Fraction:
    rate = Fraction(value).limit_denominator(1001) if 0 < value < float("inf") else Fraction(0)
    if not rate:
        raise ValueError(f"frame_rate {value} is not at least 1/1001 frames per second")
    return rate


def _stereo(audio_CN: torch.Tensor) -> np.ndarray:
    if audio_CN.ndim != 2 or audio_CN.shape[0] not in (1, 2) or not audio_CN.is_floating_point():
        raise ValueError(f"expected a float waveform (1 or 2, N), got {audio_CN.dtype} {tuple(audio_CN.shape)}")
    audio_CN = audio_CN.detach().cpu().float()
    bad = int((~audio_CN.isfinite()).sum())
    if bad:
        raise ValueError(f"{bad} of {audio_CN.numel()} audio samples are not finite")
    return audio_CN.clamp(-1, 1).expand(2, -1).contiguous().numpy()
