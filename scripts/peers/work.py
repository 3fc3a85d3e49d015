"""What a request did: seconds by stage without counting any twice, transformer calls, decoder queries, latents."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass
class NestedClock:
    """`with clock("stage1"):` as runner.metrics.StageClock; the seconds of a stage inside another are its own alone."""

    device: torch.device
    seconds: dict[str, float] = field(default_factory=dict)
    _open: list[str] = field(default_factory=list)
    _since: float = 0.0

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        """On a GPU the device is idle at both ends."""
        self._charge()
        self._open.append(stage)
        try:
            yield
        finally:
            self._charge()
            self._open.pop()

    def _charge(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        now = time.perf_counter()
        if self._open:
            self.seconds[self._open[-1]] = self.seconds.get(self._open[-1], 0.0) + now - self._since
        self._since = now


class TimedCalls:
    """Stands in for a pipeline: a call runs in a stage of the clock, everything else is the pipeline's.

    `stage_of` gets the arguments of the call by name. `prompts` times the pipeline's encode_prompt as "encode".
    """

    def __init__(
        self,
        pipe: Any,
        clock: Callable[[], NestedClock],
        stage_of: Callable[[dict[str, Any]], str],
        *,
        prompts: bool = False,
    ) -> None:
        self._pipe, self._clock, self._stage_of = pipe, clock, stage_of
        self.given: tuple[Any, ...] = ()
        if prompts:
            encode = pipe.encode_prompt

            def encode_prompt(*args: Any, **kwargs: Any) -> Any:
                with clock()("encode"):
                    return encode(*args, **kwargs)

            pipe.encode_prompt = encode_prompt

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.given = args
        with self._clock()(self._stage_of(kwargs)):
            return self._pipe(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pipe, name)


@dataclass
class Work:
    """`video_tokens` of every call of the transformer, in order; `decoder_queries` over all attentions of the decoder.

    `decoder_queries` counts this rank's; a decode in overlapping tiles has more than the untiled one.
    """

    video_tokens: list[int] = field(default_factory=list)
    decoder_queries: int = 0
    latents: torch.Tensor | None = None

    def to_json(self) -> dict[str, Any]:
        """JSON types."""
        return {"transformer_video_tokens": self.video_tokens, "decoder_queries": self.decoder_queries}

    def count_queries(self, x: torch.Tensor) -> None:
        """(B, T, H, W, ...) queries of one attention."""
        self.decoder_queries += x.shape[:4].numel()


class CountedAttention:
    """Stands in for an attention: counts the queries of every call, everything else is the attention's."""

    def __init__(self, attention: Any, work: Work) -> None:
        self._attention, self._work = attention, work

    def __call__(self, q: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        self._work.count_queries(q)
        return self._attention(q, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._attention, name)


@contextmanager
def watch(work: Work, *, transformer: Any, decoder: Any) -> Iterator[None]:
    """Count what goes through the two models in the block. For a warm-up: the hooks cost a little time."""

    def transformer_called(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        work.video_tokens.append(kwargs["hidden_states"].shape[1])

    def attention_called(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        work.count_queries(args[0] if args else kwargs["hidden_states"])

    # Before every other hook: the one that shards would leave this rank's tokens alone.
    hooks = [transformer.register_forward_pre_hook(transformer_called, with_kwargs=True, prepend=True)]
    for module in decoder.modules():
        if hasattr(module, "to_q") and hasattr(module, "kernel_size"):
            hooks.append(module.register_forward_pre_hook(attention_called, with_kwargs=True))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
