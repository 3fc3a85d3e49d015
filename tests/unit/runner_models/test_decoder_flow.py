"""The decoder's bookkeeping at production depths, counted without tensors: caps, order, states, shards and halos."""

from collections.abc import Iterator

import pytest

from layers.neighborhood_attention.geometry import window_start
from runner_models.ltx2.build import component_config
from runner_models.ltx2.decoder.flow import Node, WindowNode, drive
from runner_models.ltx2.decoder.geometry import Window, ghost_latents, halo, split_rows, stages_of

CONFIG = component_config("diffusion_decoder")


class CountingBlock(WindowNode[range]):
    """A block whose frames are their numbers."""

    def __init__(self, length: int, kernel: int, cap: int) -> None:
        super().__init__(Window(length, kernel), cap)
        self.most_keys = self.most_queries = self.most_pushed = self.longest = 0

    def take(self, frames: range) -> int:
        assert frames.start == self.window.received, "lost, repeated or out of order"
        assert len(frames) <= self.cap
        self.most_pushed = max(self.most_pushed, len(frames))
        return len(frames)

    def answer(self, count: int) -> range:
        window, first = self.window, self.window.finished
        for query in (first, first + count - 1):
            start = window_start(query, window.kernel, window.length)
            assert window.first_key <= start, "a key was dropped too early"
            assert start + window.kernel <= window.received, "a query was answered too early"
        window.finish(count)
        self.longest = max(self.longest, count)
        return range(first, first + count)

    def rest(self) -> None:
        """Between two pushes from above."""
        kept = self.window.received - self.window.first_key
        self.most_keys = max(self.most_keys, kept)
        self.most_queries = max(self.most_queries, self.window.received - self.window.finished)


class CountingUpsample:
    def __init__(self, stride: int, cap: int) -> None:
        self.stride, self.cap = stride, cap

    def push(self, frames: range) -> Iterator[range]:
        drop = self.stride == 2
        begin = frames.start * self.stride - (drop and frames.start > 0)
        yield range(begin, frames.stop * self.stride - drop)


class CountingCrop:
    def __init__(self, length: int, cap: int) -> None:
        self.length, self.cap = length, cap

    def push(self, frames: range) -> Iterator[range]:
        if frames.start < self.length:
            yield range(frames.start, min(frames.stop, self.length))


def split(frames: range, cap: int) -> Iterator[range]:
    return (frames[first : first + cap] for first in range(0, len(frames), cap))


def production(num_frames: int, chunk: int) -> tuple[list[Node[range]], list[range], list[int]]:
    """The nodes at production depths; what leaves them; the latent frames pushed before each piece left."""
    latents = (num_frames - 1) // 8 + 1
    stages = stages_of(CONFIG, (latents, 16, 24))
    nodes: list[Node[range]] = []
    for index, stage in enumerate(stages):
        cap = stage.cap(chunk, 8)
        if index == len(stages) - 1:
            nodes.append(CountingCrop(stage.grid[0], cap))
        nodes += [CountingBlock(stage.grid[0], stage.kernel[0], cap) for _ in range(stage.depth)]
        if index < len(stages) - 1:
            nodes.append(CountingUpsample(CONFIG["decoder_upsample_strides"][index][0], cap))
    pushed = 0

    def source() -> Iterator[range]:
        nonlocal pushed
        for piece in split(range(latents + ghost_latents(CONFIG)), nodes[0].cap):
            for node in nodes:
                if isinstance(node, CountingBlock):
                    node.rest()
            pushed = piece.stop
            yield piece

    out, after = [], []
    for piece in drive(nodes, source(), split=split):
        out.append(piece)
        after.append(pushed)
    return nodes, out, after


@pytest.mark.parametrize("chunk", [8, 16, 24, 1024], ids=lambda chunk: f"chunk{chunk}")
@pytest.mark.parametrize("num_frames", [17, 25, 49, 97, 121, 257, 481])
def test_production_depths(num_frames: int, chunk: int) -> None:
    nodes, out, _ = production(num_frames, chunk)
    assert [frame for piece in out for frame in piece] == list(range(num_frames)), "nothing lost, nothing twice"
    blocks = [node for node in nodes if isinstance(node, CountingBlock)]
    assert len(blocks) == 24
    for block in blocks:
        assert block.longest <= block.cap
        assert block.window.finished == block.window.length
        assert block.most_keys <= block.window.kernel
        assert block.most_queries <= block.window.kernel - 1
    if chunk == 8 and num_frames >= 257:
        last = blocks[-8:]
        assert [block.most_keys for block in last] == [10] * 8, "K - 1 frames of keys and values"
        assert min(block.most_queries for block in last) >= 5, "K // 2 queries wait"


def test_the_first_frame_of_121_waits_for_the_last_latent() -> None:
    """The look-ahead of the whole stack is 17.5 latent frames; memory is what streaming bounds, not this delay."""
    _, _, after = production(121, 8)
    assert after[0] == 18
    _, _, longer = production(481, 8)
    assert longer[0] == 20, "17.5 and what the chunks round up"
    assert longer[len(longer) // 2] < longer[-1]


@pytest.mark.parametrize("kernel", [1, 3, 11])
@pytest.mark.parametrize("length", [11, 12, 40])
def test_a_query_is_ready_as_soon_as_its_window_is_there(length: int, kernel: int) -> None:
    window = Window(length, kernel)
    for received in range(1, length + 1):
        window.receive(1)
        ready = sum(window_start(p, kernel, length) + kernel <= received for p in range(length))
        assert window.finished + window.ready == ready
        if window.ready:
            window.finish(window.ready)


def test_stages_of_the_released_decoder() -> None:
    stages = stages_of(CONFIG, (16, 48, 32))
    assert [stage.grid for stage in stages] == [
        (18, 48, 32),
        (18, 96, 64),
        (35, 96, 64),
        (69, 192, 128),
        (121, 384, 256),
    ]
    assert [stage.scale for stage in stages] == [(1, 1, 1), (1, 2, 2), (2, 2, 2), (4, 4, 4), (8, 8, 8)]
    with pytest.raises(ValueError, match="stage 1 a grid of 18x6x32, smaller than its window 3x7x7"):
        stages_of(CONFIG, (16, 6, 32))


def test_split_rows() -> None:
    assert split_rows(7, 3) == ((0, 3), (3, 5), (5, 7))
    assert split_rows(16, 8)[-1] == (14, 16)
    with pytest.raises(ValueError, match="7 latent rows cannot be shared by 8 ranks"):
        split_rows(7, 8)


@pytest.mark.parametrize("shares", [(8,), (4, 4), (1, 2, 5), (1,) * 8, (2, 2, 2, 2)], ids=str)
@pytest.mark.parametrize(("scale", "kernel"), [(1, 7), (2, 7), (2, 5), (8, 11)])
def test_halos_fit_together(shares: tuple[int, ...], scale: int, kernel: int) -> None:
    """Every row a window of a rank touches is its own or comes from its owner, once; what is sent is received."""
    bounds = tuple((sum(shares[:i]) * scale, sum(shares[: i + 1]) * scale) for i in range(len(shares)))
    length = bounds[-1][1]
    halos = [halo(bounds, rank, kernel=kernel, length=length) for rank in range(len(bounds))]
    for rank, found in enumerate(halos):
        touched = {window_start(row, kernel, length) + k for row in range(*found.own) for k in range(kernel)}
        assert touched == set(range(*found.needed))
        rows = [*range(*found.own), *(row for _, span in found.receives for row in range(*span))]
        assert sorted(rows) == list(range(*found.needed))
        for peer, span in found.receives:
            assert bounds[peer][0] <= span[0] < span[1] <= bounds[peer][1]
            assert (rank, span) in halos[peer].sends
        assert sum(len(other.sends) for other in halos) == sum(len(other.receives) for other in halos)
        for row in range(*found.interior):
            start = window_start(row, kernel, length)
            assert found.own[0] <= start
            assert start + kernel <= found.own[1]
