"""xfuser's runner flags that this runner does not have, and what to use instead (xfuser 0.7.0, config/args.py)."""

from collections.abc import Sequence

# (advice, names); name=value: that value is xfuser's default, changes nothing, and is accepted.
_ADVICE: tuple[tuple[str, str], ...] = (
    (
        "every prompt is a request of its own; leave it out, or spread prompts with --data_parallel_degree",
        "batch_size=1",
    ),
    ("--attention_backend sets video self-attention; all other attention runs torch's", "cross_attention_backend=None"),
    ("the guidance passes run one after another; use --ulysses_degree or --ring_degree", "use_cfg_parallel"),
    (
        "use --ulysses_degree and --ring_degree to spread the transformer",
        "pipefusion_parallel_degree=1 tensor_parallel_degree=1",
    ),
    ("the text encoder is not split; use --enable_model_cpu_offload to save memory", "text_encoder_tp_degree=1"),
    (
        "the weights are not sharded; use --enable_model_cpu_offload to save memory",
        "fully_shard_degree=1 no_reshard_after_forward memory_efficient_sharding memory_efficient_replicated_load",
    ),
    ("LTX-2.5 has one transformer; use --guidance_scale with --model LTX-2.5-full", "guidance_scale_2=None"),
    ("the schedule belongs to the model; leave it out", "flow_shift=None"),
    (
        "use --enable_model_cpu_offload",
        "enable_sequential_cpu_offload enable_group_cpu_offload group_offload_low_cpu_mem",
    ),
    ("videos are decoded one at a time already; leave it out", "enable_slicing"),
    (
        "the decode has no tiles to size; use --enable_tiling to bound its memory",
        "vae_tile_size_height=None vae_tile_size_width=None vae_tile_overlap_height=None vae_tile_overlap_width=None",
    ),
    ("the memory layout is not an option; leave it out", "use_vae_channels_last_format"),
    (
        "matrix products are not quantised; use --dtype bf16",
        "gemm_quantization=none gemm_config=None use_int8_gemms use_fp8_gemms use_fp8_text_encoder use_fp4_gemms "
        "fp8_precision_override_prefix_patterns=None fp8_precision_override_suffix_patterns=None "
        "use_hybrid_gemm_schedule num_hybrid_gemm_high_precision_steps=None",
    ),
    (
        "communication is not quantised; use --dtype bf16",
        "use_fp8_comms fp8_comms_scale=None fp8_comms_safety_factor=0.85",
    ),
    (
        "one seed gives one file; run twice and compare the videos",
        "determinism_check=0 determinism_check_report_ranks=last",
    ),
    (
        "--profile traces the last request; --warmup_calls and --num_iterations set the runs before it",
        "profile_wait=2 profile_warmup=2 profile_active=1 profile_capture_phase profile_with_stack",
    ),
    (
        "one attention kernel serves all steps; use --attention_backend",
        "use_hybrid_attn_schedule hybrid_attn_low_precision_backend=None hybrid_attn_high_precision_backend=None "
        "num_hybrid_attn_high_precision_steps=None hybrid_attn_schedule=None",
    ),
    (
        "sparse attention leaves out keys, which changes the video; use a dense --attention_backend",
        "use_ssta_sparse_text_to_image spargeattn_simthreshold=0.3 spargeattn_cdfthreshold=0.92 "
        "spargeattn_reorder_sequence no_spargeattn_reorder_sequence use_spargeattn_static_block_mask "
        "no_use_spargeattn_static_block_mask use_spargeattn_head_balance vsa_block_size=128 vsa_top_k=1 "
        "vsa_top_k_ratio=0.0 vsa_drop_rates=None vsa_prob_threshold=0.9 vsa_reorder_sequence no_vsa_reorder_sequence "
        "use_vsa_static_block_mask no_use_vsa_static_block_mask use_vsa_first_frame_mask no_use_vsa_first_frame_mask "
        "vsa_collect_density",
    ),
    (
        "give --model a checkpoint folder that holds the transformer",
        "distilled_transformer_path=None distilled_transformer_2_path=None",
    ),
    (
        "caching steps changes the video; leave it out",
        "use_teacache use_fbcache cache_method=None cache_config=None",
    ),
)


def _table() -> dict[str, tuple[str | None, str]]:
    rows = [(*entry.partition("=")[::2], advice) for advice, names in _ADVICE for entry in names.split()]
    return {name: (neutral or None, advice) for name, neutral, advice in rows}


UNSUPPORTED: dict[str, tuple[str | None, str]] = _table()
"""Flag name -> (the value that changes nothing, or None where any use is refused; advice)."""


def refusal(name: str, values: Sequence[str]) -> str | None:
    """Why `--name *values` cannot be taken; None for a name that is not listed, or its neutral value."""
    if name not in UNSUPPORTED:
        return None
    neutral, advice = UNSUPPORTED[name]
    if neutral is not None and len(values) == 1 and _equal(values[0], neutral):
        return None
    given = " ".join(("", *values))
    return f"--{name}{given} is a flag of xfuser that this runner does not support: {advice}."


def _equal(value: str, neutral: str) -> bool:
    try:
        return float(value) == float(neutral)
    except ValueError:
        return value == neutral
