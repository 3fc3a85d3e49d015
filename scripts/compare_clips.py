"""Reading for compare_videos.py: frames one by one, the whole sound, and what makes two clips comparable.

Layouts: H height, W width, C channels, N samples.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import av
import imageio.v3 as iio
import numpy as np

SMALLEST_FRAME = 7
"""Pixels; SSIM's window."""


class NotComparable(ValueError):
    """What keeps two files from being compared, in words for the user; exit code 2."""


@dataclass(frozen=True)
class Clip:
    """One video file. `audio_CN` is float in [-1, 1], None without a sound track; `frame_rate` in frames per second.

    `declared_frames` is what the header says, 0 where it says nothing.
    """

    path: Path
    height: int
    width: int
    frame_rate: Fraction
    declared_frames: int
    audio_CN: np.ndarray | None
    audio_sample_rate: int

    def frames(self) -> Iterator[np.ndarray]:
        """(H, W, 3) uint8, in order.

        Raises:
            NotComparable: the file is damaged.
        """
        try:
            yield from iio.imiter(self.path, plugin="pyav")
        except (av.error.FFmpegError, OSError) as error:
            raise NotComparable(f"{self.path} is damaged: {error}") from error


def open_clip(path: Path) -> Clip:
    """Read the header and decode the sound.

    Raises:
        NotComparable: there is no such file, or it holds no video that ffmpeg can read.
    """
    if not path.is_file():
        raise NotComparable(f"{path} is not a file; give an mp4")
    try:
        with av.open(str(path)) as container:
            if not container.streams.video:
                raise NotComparable(f"{path} has no video stream")
            video = container.streams.video[0]
            rate = Fraction(video.average_rate or 0)
            height, width, declared = video.height, video.width, video.frames
            sound, sample_rate = None, 0
            if container.streams.audio:
                stream = container.streams.audio[0]
                sample_rate = stream.rate
                sound = _samples(container, stream)
    except (av.error.FFmpegError, OSError) as error:
        raise NotComparable(f"{path} cannot be read as a video: {error}") from error
    return Clip(path, height, width, rate, declared, sound, sample_rate)


def _samples(container: "av.container.InputContainer", stream: "av.AudioStream") -> np.ndarray:
    """(C, N) of the whole track, as planar float."""
    resampler = av.AudioResampler(format="fltp", layout=stream.layout, rate=stream.rate)
    parts = [part.to_ndarray() for frame in container.decode(stream) for part in resampler.resample(frame)]
    parts += [part.to_ndarray() for part in resampler.resample(None)]
    return np.concatenate(parts, axis=1) if parts else np.zeros((stream.channels, 0), np.float32)


def check_comparable(a: Clip, b: Clip, *, ignore_audio: bool) -> None:
    """What the headers tell, before the frames are read.

    Raises:
        NotComparable: another size, length, frame rate, sample rate or number of channels, frames too small for SSIM's
            window, or sound in one alone.
    """
    if (a.height, a.width) != (b.height, b.width):
        raise NotComparable(
            f"{a.path} is {a.width}x{a.height} and {b.path} is {b.width}x{b.height} (width x height); "
            "only videos of one size can be compared"
        )
    if a.frame_rate != b.frame_rate:
        raise NotComparable(
            f"{a.path} has {float(a.frame_rate):g} frames per second and {b.path} has {float(b.frame_rate):g}"
        )
    if min(a.height, a.width) < SMALLEST_FRAME:
        raise NotComparable(f"{a.path} is {a.width}x{a.height}; SSIM needs {SMALLEST_FRAME}x{SMALLEST_FRAME} pixels")
    if a.declared_frames and b.declared_frames and a.declared_frames != b.declared_frames:
        raise _other_length(a, a.declared_frames, b, b.declared_frames)
    if ignore_audio:
        return
    for one, other in ((a, b), (b, a)):
        if one.audio_CN is None and other.audio_CN is not None:
            raise NotComparable(
                f"{one.path} has no sound and {other.path} has; --ignore_audio compares the frames alone"
            )
    if a.audio_CN is None or b.audio_CN is None:
        return
    if a.audio_sample_rate != b.audio_sample_rate or len(a.audio_CN) != len(b.audio_CN):
        raise NotComparable(
            f"{a.path} has {len(a.audio_CN)} channel(s) at {a.audio_sample_rate} Hz and {b.path} {len(b.audio_CN)} at "
            f"{b.audio_sample_rate} Hz; --ignore_audio compares the frames alone"
        )


def check_audio_length(a: Clip, b: Clip) -> None:
    """After the frames: a damaged file says so first.

    Raises:
        NotComparable: sound that differs by more than a video frame's time.
    """
    if a.audio_CN is None or b.audio_CN is None:
        return
    apart = abs(a.audio_CN.shape[1] - b.audio_CN.shape[1])
    if apart > a.audio_sample_rate / max(a.frame_rate, 1):
        raise NotComparable(
            f"{a.path} has {a.audio_CN.shape[1]} audio samples and {b.path} {b.audio_CN.shape[1]}, more than a video "
            "frame apart; --ignore_audio compares the frames alone"
        )


def _other_length(a: Clip, frames_of_a: int, b: Clip, frames_of_b: int) -> NotComparable:
    return NotComparable(
        f"{a.path} has {frames_of_a} frames and {b.path} has {frames_of_b}; only videos of one length can be compared"
    )


def frame_pairs(a: Clip, b: Clip) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Frames of both, in step.

    Raises:
        NotComparable: one has fewer frames (said with both counts), or none.
    """
    first, second, count = a.frames(), b.frames(), 0
    while True:
        one, other = next(first, None), next(second, None)
        if one is None or other is None:
            counts = [
                count + (left is not None) + sum(1 for _ in rest) for left, rest in ((one, first), (other, second))
            ]
            if counts[0] != counts[1]:
                raise _other_length(a, counts[0], b, counts[1])
            if not count:
                raise NotComparable(f"{a.path} and {b.path} hold no frame")
            return
        yield one, other
        count += 1
