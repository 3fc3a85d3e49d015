"""xfuser's LTX-2.5 runner class (0.7.0), run by its own `initialize`, `run` and `save_output` on the bench's weights.

Nothing of it is replaced but where it would read a checkpoint: while it loads, `from_pretrained` gives the modules that
are in memory already. It chooses its decoder attention (NATTEN or tiled SDPA) and its transformer attention itself.
xfuser refuses to import on a machine without an accelerator, so that it is imported here alone, when it is asked for.
"""

import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from peers.peer import Made
from peers.sharing import rebuild, share_parts
from peers.work import NestedClock, TimedCalls
from runner.config import RunConfig
from runner.distributed import Session
from runner_models.api import SetupError, VideoRequest
from runner_models.ltx2.load import Parts

MODEL = "Lightricks/LTX-2.5-Diffusers"


class XfuserRunner:
    """A `peers.peer.Peer`."""

    def __init__(self, parts: Parts, config: RunConfig, request: VideoRequest, session: Session, *, tile: bool) -> None:
        """Raises ImportError or NotImplementedError where xfuser cannot be imported, SetupError for other models."""
        if not config.recipe.distilled or config.data_parallel_degree > 1:
            raise SetupError("the xfuser peer runs the distilled model, without data parallelism")
        self.device = session.state.device
        self._own_group = not dist.is_initialized()
        _environment()
        xfuser = _import()
        xfuser.init_distributed_environment()  # what it skips where a group is up already
        images = [] if request.image is None else [request.image]
        arguments = xfuser.Args(
            model=MODEL,
            task=config.task,
            height=request.height,
            width=request.width,
            num_frames=request.num_frames,
            num_inference_steps=request.num_inference_steps,
            guidance_scale=request.guidance_scale,
            max_sequence_length=request.max_sequence_length,
            prompt=request.prompt,
            negative_prompt=request.negative_prompt,
            seed=request.seed,
            input_images=images,
            ulysses_degree=config.ulysses_degree,
            ring_degree=config.ring_degree,
            use_torch_compile=config.use_torch_compile,
            attention_backend=config.attention_backend,
            use_parallel_vae=config.use_parallel_vae and session.state.world_size > 1,
            enable_tiling=tile,
        )
        arguments.create_config()
        self.model = xfuser.Model(arguments)
        self._arguments = self.model.preprocess_args(vars(arguments))
        self._clock = NestedClock(self.device)
        started = time.perf_counter()
        with _in_memory(xfuser, share_parts(parts)):
            self.model.initialize(self._arguments)
        self.compile_seconds = time.perf_counter() - started if config.use_torch_compile else None
        self.transformer, self.decoder = self.model.pipe.transformer, self.model.decode_pipe.diffusion_decoder
        self.model.pipe.set_progress_bar_config(disable=True)
        self._time_calls()

    def _time_calls(self) -> None:
        model = self.model
        model.pipe = TimedCalls(
            model.pipe, self._now, lambda given: "stage2" if "latents" in given else "stage1", prompts=True
        )
        model.upsample_pipe = TimedCalls(model.upsample_pipe, self._now, lambda given: "upsample")
        model.decode_pipe = TimedCalls(model.decode_pipe, self._now, lambda given: "video_decode")

    def _now(self) -> NestedClock:
        return self._clock

    def generate(self, clock: NestedClock) -> Made:
        """See Peer. The audio is all that its `run` does outside of its pipelines."""
        self._clock = clock
        with clock("audio_decode"):
            output, _ = self.model.run(self._arguments)
        video = output.videos[0]
        rate = int(self.model.pipe.vocoder.config.output_sampling_rate)
        return Made(video.frames[0], video.audio[0].float().cpu(), rate, raw=output)

    def save(self, made: Made, directory: Path) -> Path | None:
        """Its last rank saves."""
        if dist.get_rank() != dist.get_world_size() - 1:
            return None
        self.model.config.output_directory = str(directory)
        self.model.save_output(made.raw)
        return max(directory.glob("*.mp4"), key=lambda path: path.stat().st_mtime)

    def latents(self) -> torch.Tensor:
        """See Peer."""
        return self.model.decode_pipe.given[0]

    def describe(self) -> dict[str, Any]:
        """What it chose, by its own names."""
        from xfuser.core.distributed import get_runtime_state

        processors = {type(processor).__name__ for processor in _processors(self.decoder)}
        return {
            "xfuser": version("xfuser"),
            "attention_backend": get_runtime_state().attention_backend.name,
            "decoder_attention": ", ".join(sorted(processors)),
            "video_decode": {
                "method": "tiled" if self.decoder.use_tiling else "whole",
                "tiles_over_ranks": bool(self.decoder._parallel_decode),
            },
        }

    def close(self) -> None:
        """See Peer."""
        self.model.pipe = self.model.decode_pipe = self.model.upsample_pipe = None
        if self._own_group and dist.is_initialized():
            dist.destroy_process_group()


def _processors(decoder: Any) -> Iterator[Any]:
    return (module.processor for module in decoder.modules() if hasattr(module, "processor"))


def _environment() -> None:
    """What torchrun would set, for one process: xfuser reads it even then."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    alone = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    if "RANK" not in os.environ:
        os.environ.update({name: str(value) for name, value in alone.items()})


def _import() -> SimpleNamespace:
    from xfuser import xFuserArgs
    from xfuser.core.distributed import init_distributed_environment
    from xfuser.model_executor.layers.ltx2.diffusion_decoder import xFuserLTX2VideoDiffusionDecoderWrapper
    from xfuser.model_executor.models.runner_models.ltx import xFuserLTX25DistilledVideoModel
    from xfuser.model_executor.models.transformers.transformer_ltx2 import xFuserLTX2VideoTransformer3DWrapper

    return SimpleNamespace(
        Args=xFuserArgs,
        Model=xFuserLTX25DistilledVideoModel,
        Transformer=xFuserLTX2VideoTransformer3DWrapper,
        Decoder=xFuserLTX2VideoDiffusionDecoderWrapper,
        init_distributed_environment=init_distributed_environment,
    )


@contextmanager
def _in_memory(xfuser: SimpleNamespace, parts: Parts) -> Iterator[None]:
    """While it loads, every `from_pretrained` that it calls gives what is in memory."""
    from diffusers import LTX2ImageToVideoPipeline, LTX2Pipeline
    from diffusers.pipelines.ltx2.latent_upsampler import LTX2LatentUpsamplerModel

    components = parts.pipeline.components

    def pipeline(kind: type) -> Callable[..., Any]:
        return lambda *args, transformer, **kwargs: kind(**components | {"transformer": transformer})

    given: dict[type, Callable[..., Any]] = {
        xfuser.Transformer: lambda *args, **kwargs: rebuild(parts.pipeline.transformer, xfuser.Transformer),
        xfuser.Decoder: lambda *args, **kwargs: rebuild(parts.diffusion_decoder, xfuser.Decoder),
        LTX2LatentUpsamplerModel: lambda *args, **kwargs: parts.latent_upsampler,
        LTX2Pipeline: pipeline(LTX2Pipeline),
        LTX2ImageToVideoPipeline: pipeline(LTX2ImageToVideoPipeline),
    }
    with ExitStack() as stack:
        for kind, make in given.items():
            stack.enter_context(mock.patch.object(kind, "from_pretrained", make))
        yield
