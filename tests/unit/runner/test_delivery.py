"""Encoding in the background: order, back pressure, and errors of either side."""

import threading
from pathlib import Path

import pytest
import torch

from runner.delivery import BackgroundWriter
from runner.media import VideoWriter

SIZE = {"height": 32, "width": 32, "frame_rate": 24}


def _frames(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (count, 32, 32, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


class _Gate(VideoWriter):
    """Encodes nothing until it is opened."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, **SIZE)
        self.open = threading.Event()

    def write(self, frames_FHWC: torch.Tensor) -> None:
        assert self.open.wait(10)
        super().write(frames_FHWC)


def test_the_same_file_as_without_it(tmp_path: Path) -> None:
    pieces = [_frames(n, n) for n in (6, 8, 3)]
    with BackgroundWriter(VideoWriter(tmp_path / "a.mp4", **SIZE)) as background:
        for piece in pieces:
            background.write(piece)
    with VideoWriter(tmp_path / "b.mp4", **SIZE) as writer:
        writer.write(torch.cat(pieces))
    assert (tmp_path / "a.mp4").read_bytes() == (tmp_path / "b.mp4").read_bytes()


def test_a_slow_encoder_holds_the_decode_back(tmp_path: Path) -> None:
    gate = _Gate(tmp_path / "a.mp4")
    written = []
    piece = _frames(2)

    def decode() -> None:
        with BackgroundWriter(gate, queue_bytes=2 * piece.nbytes) as background:
            for index in range(6):
                background.write(piece)
                written.append(index)
            waited.append(background.waited_seconds)

    waited: list[float] = []
    thread = threading.Thread(target=decode)
    thread.start()
    thread.join(0.3)
    assert len(written) <= 3, "two wait and one is in the encoder's hands"
    gate.open.set()
    thread.join(10)
    assert len(written) == 6
    assert waited[0] > 0.1
    assert (tmp_path / "a.mp4").exists()


def test_one_piece_larger_than_the_queue_goes_through(tmp_path: Path) -> None:
    with BackgroundWriter(VideoWriter(tmp_path / "a.mp4", **SIZE), queue_bytes=1) as background:
        for _ in range(3):
            background.write(_frames(2))
    assert (tmp_path / "a.mp4").exists()


def test_what_the_encoder_raises_reaches_the_decode(tmp_path: Path) -> None:
    def decode() -> None:
        with BackgroundWriter(VideoWriter(tmp_path / "a.mp4", **SIZE), queue_bytes=1) as background:
            for _ in range(50):
                background.write(_frames(1)[:, :16])

    with pytest.raises(ValueError, match="expected uint8 frames"):
        decode()
    assert not list(tmp_path.iterdir())


def test_what_the_decode_raises_removes_the_file(tmp_path: Path) -> None:
    def decode() -> None:
        with BackgroundWriter(VideoWriter(tmp_path / "a.mp4", **SIZE)) as background:
            background.write(_frames(2))
            raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        decode()
    assert not list(tmp_path.iterdir())


def test_no_frame_at_all_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no frame"), BackgroundWriter(VideoWriter(tmp_path / "a.mp4", **SIZE)):
        pass
