"""From the rank that decodes to the file: encoding while later frames are decoded, and videos of other replicas."""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist
from torch.profiler import record_function

from layers.parallel_state import ParallelState
from runner.config import RunConfig
from runner.distributed import Session
from runner.media import VideoWriter
from runner.sidecar import output_path, partial_path
from runner_models.api import VideoOutput, VideoRequest

QUEUE_BYTES = 2**30
"""Decoded frames that wait for the encoder: 227 frames of 1536x1024."""


class BackgroundWriter:
    """Encodes in a thread of its own, so that decoding goes on meanwhile.

        with BackgroundWriter(VideoWriter(...)) as writer:
            for frames in video.frames:
                writer.write(frames)

    At most `queue_bytes` of frames wait (but always one piece): `write` blocks until there is room. What the encoder
    raises is raised by the next `write`, or on leaving. An exception in the block, or of the encoder, removes the file.
    `waited_seconds` is how long `write` stood blocked.
    """

    def __init__(self, writer: VideoWriter, *, queue_bytes: int = QUEUE_BYTES) -> None:
        self.writer = writer
        self.queue_bytes = queue_bytes
        self.waited_seconds = 0.0
        self._changed = threading.Condition()
        self._waiting: deque[torch.Tensor] = deque()
        self._waiting_bytes = 0
        self._ended = self._given_up = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._encode, name="encode", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def write(self, frames_FHWC: torch.Tensor) -> None:
        """Hand over (n, H, W, 3) uint8 frames, which must not be changed afterwards."""
        start = time.perf_counter()
        with self._changed:
            self._changed.wait_for(
                lambda: self._error or not self._waiting or self._waiting_bytes + frames_FHWC.nbytes <= self.queue_bytes
            )
            self.waited_seconds += time.perf_counter() - start
            if self._error is not None:
                raise self._error
            self._waiting.append(frames_FHWC)
            self._waiting_bytes += frames_FHWC.nbytes
            self._changed.notify_all()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._changed:
            self._ended, self._given_up = True, kind is not None
            self._changed.notify_all()
        with record_function("mux"):
            self._thread.join()
        if kind is None and self._error is not None:
            raise self._error

    def _encode(self) -> None:
        try:
            with self.writer:
                for frames in self._handed_over():
                    self.writer.write(frames)
        except BaseException as error:  # noqa: BLE001  # raised in the thread that hands over the frames
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _handed_over(self) -> Iterator[torch.Tensor]:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._ended)
                if self._given_up:
                    raise InterruptedError("the frames ended early")
                if not self._waiting:
                    return
                frames = self._waiting.popleft()
            yield frames
            with self._changed:
                self._waiting_bytes -= frames.nbytes
                self._changed.notify_all()


@dataclass(frozen=True)
class Saved:
    """A video that was written, and the seconds of the stages that writing it changed."""

    path: Path
    audio_sample_rate: int
    stage_seconds: dict[str, float]


Save = Callable[[int, VideoOutput, dict[str, float]], Saved]
"""(prompt index, the video, seconds so far by stage) -> what was written."""


def save_video(
    directory: Path,
    config: RunConfig,
    requests: list[VideoRequest],
    session: Session,
    index: int,
    output: VideoOutput,
    seconds: dict[str, float],
) -> Saved:
    """Write the mp4 under a free name of `directory` while its frames come.

    `mux` is what writing took beyond the decode. Where the decode stood waiting for the encoder, that is taken from
    `video_decode` and counted as `mux`.
    """
    request = requests[index]
    path = output_path(directory, config.output_stem(index))
    session.on_abort(lambda: partial_path(path).unlink(missing_ok=True))
    writer = VideoWriter(
        path,
        height=request.height,
        width=request.width,
        frame_rate=request.frame_rate,
        audio=output.audio,
        audio_sample_rate=output.audio_sample_rate,
    )
    started = time.perf_counter()
    with BackgroundWriter(writer) as background:
        for frames in output.frames:
            background.write(frames)
    elapsed = time.perf_counter() - started
    changed = {}
    if "video_decode" in seconds:
        changed["video_decode"] = seconds["video_decode"] - background.waited_seconds
    changed["mux"] = elapsed - changed.get("video_decode", 0.0)
    return Saved(path, output.audio_sample_rate, changed)


def send_video(output: VideoOutput, state: ParallelState) -> None:
    """From a replica's leader to rank 0, over the group of all leaders; on the CPU, so by gloo."""
    pieces = list(output.frames)
    header = [([piece.shape for piece in pieces], output.audio.shape, output.audio_sample_rate)]
    dist.send_object_list(header, dst=0, group=state.data_parallel_group, device=torch.device("cpu"))
    for tensor in (output.audio, *pieces):
        dist.send(tensor.contiguous(), dst=0, group=state.data_parallel_group)


def receive_video(leader: int, state: ParallelState) -> VideoOutput:
    """On rank 0, from global rank `leader`; the frames come while they are read."""
    header: list[Any] = [None]
    dist.recv_object_list(header, src=leader, group=state.data_parallel_group, device=torch.device("cpu"))
    shapes, audio_shape, rate = header[0]
    audio = torch.empty(audio_shape)
    dist.recv(audio, src=leader, group=state.data_parallel_group)

    def frames() -> Iterator[torch.Tensor]:
        for shape in shapes:
            piece = torch.empty(shape, dtype=torch.uint8)
            dist.recv(piece, src=leader, group=state.data_parallel_group)
            yield piece

    return VideoOutput(frames(), audio, rate)
