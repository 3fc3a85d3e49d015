"""How LTX-2.5 is sampled: schedules, guidance and limits of the two released transformers.

Values are those of the LTX-2 reference constants as diffusers 0.42 carries them (pipelines/ltx2/utils.py) and of the
defaults of its LTX2Pipeline. Plain data: read before torch is imported.
"""

from dataclasses import dataclass

SPATIAL_RATIO = 32
"""Pixels per latent cell along height and width."""
TEMPORAL_RATIO = 8
"""Frames per latent frame; the first latent frame holds one frame, so clips are 8*k+1 frames long."""
AUDIO_LATENTS_PER_SECOND = 25.0
"""16 kHz / hop 160 / temporal ratio 4."""
PROMPT_REGISTERS = 128
"""Learnable registers of the text connectors; the prompt length must be a multiple of it."""

DISTILLED_SIGMAS = (1.0, 0.99375, 0.9875, 0.98125, 0.975, 0.909375, 0.725, 0.421875)
STAGE_2_SIGMAS = (0.909375, 0.725, 0.421875)

DEFAULT_NEGATIVE_PROMPT = (
    "blurry, out of focus, overexposed, underexposed, low contrast, washed out colors, excessive noise, "
    "grainy texture, poor lighting, flickering, motion blur, distorted proportions, unnatural skin tones, "
    "deformed facial features, asymmetrical face, missing facial features, extra limbs, disfigured hands, "
    "wrong hand count, artifacts around text, inconsistent perspective, camera shake, incorrect depth of "
    "field, background too sharp, background clutter, distracting reflections, harsh shadows, inconsistent "
    "lighting direction, color banding, cartoonish rendering, 3D CGI look, unrealistic materials, uncanny "
    "valley effect, incorrect ethnicity, wrong gender, exaggerated expressions, wrong gaze direction, "
    "mismatched lip sync, silent or muted audio, distorted voice, robotic voice, echo, background noise, "
    "off-sync audio, incorrect dialogue, added dialogue, repetitive speech, jittery movement, awkward "
    "pauses, incorrect timing, unnatural transitions, inconsistent framing, tilted camera, flat lighting, "
    "inconsistent tone, cinematic oversaturation, stylized filters, or AI artifacts."
)


@dataclass(frozen=True)
class Guidance:
    """Scales of classifier-free (cfg), spatio-temporal skip (stg) and modality guidance for one modality.

    cfg and modality are off at 1.0, stg and rescale at 0.0.
    """

    cfg: float = 1.0
    stg: float = 0.0
    modality: float = 1.0
    rescale: float = 0.0


@dataclass(frozen=True)
class Recipe:
    """One way to sample LTX-2.5.

    `stages` is 2 for the distilled model (half size, latent upsample, full size) and 1 for the full model. `size_step`
    and `min_size` are in pixels of the finished video.
    """

    name: str
    output_name: str
    transformer_subfolder: str
    stages: int
    steps: int
    size_step: int
    min_size: int
    video: Guidance
    audio: Guidance
    stg_blocks: tuple[int, ...] = ()
    height: int = 1024
    width: int = 1536
    num_frames: int = 121
    frame_rate: float = 24.0
    max_sequence_length: int = 1024

    @property
    def distilled(self) -> bool:
        """Whether the schedule is the fixed two-stage one, without guidance."""
        return self.stages == 2


DISTILLED = Recipe(
    name="distilled",
    output_name="ltx_2_5_distilled_video",
    transformer_subfolder="transformer",
    stages=2,
    steps=len(DISTILLED_SIGMAS),
    size_step=64,
    min_size=256,
    video=Guidance(),
    audio=Guidance(),
)

FULL = Recipe(
    name="full",
    output_name="ltx_2_5_full_video",
    transformer_subfolder="transformer_full",
    stages=1,
    steps=30,
    size_step=32,
    min_size=224,
    video=Guidance(cfg=3.0, stg=1.0, modality=3.0, rescale=0.7),
    audio=Guidance(cfg=7.0, stg=1.0, modality=3.0, rescale=0.7),
    stg_blocks=(28,),
)


@dataclass(frozen=True)
class TokenCounts:
    """Latent grid (frames, rows, columns) and tokens of one denoising stage."""

    grid: tuple[int, int, int]
    video: int
    audio: int


def token_counts(recipe: Recipe, *, height: int, width: int, num_frames: int, frame_rate: float) -> list[TokenCounts]:
    """Tokens of each denoising stage, in order; height and width in pixels."""
    frames = (num_frames - 1) // TEMPORAL_RATIO + 1
    audio = round(num_frames / frame_rate * AUDIO_LATENTS_PER_SECOND)
    scales = (2, 1) if recipe.stages == 2 else (1,)
    grids = [(frames, height // scale // SPATIAL_RATIO, width // scale // SPATIAL_RATIO) for scale in scales]
    return [TokenCounts(grid, grid[0] * grid[1] * grid[2], audio) for grid in grids]
