#!/usr/bin/env bash
# Make a short video with sound from the picture in this repository, on whatever this machine has.
# Own .venv, no download of weights: the tiny random model runs every stage, so the picture is noise.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/_venv.sh
venv
export OMP_NUM_THREADS=1
# Two ranks share the video tokens and the decode: two CPU processes here, two GPUs where there are two, one where there is one.
ranks=$(python -c 'import torch; print(min(torch.cuda.device_count() or 2, 2))')
torchrun --nproc_per_node="$ranks" -m runner --model tiny --task i2v --ulysses_degree "$ranks" --use_parallel_vae \
    --input_images docs/assets/demo_cat.jpg --resize_input_images \
    --height 512 --width 768 --num_frames 25 --num_inference_steps 8 --seed 42 \
    --prompt "a cat dancing at sunset, camera slowly pans" \
    --output_directory results/demo "$@"
