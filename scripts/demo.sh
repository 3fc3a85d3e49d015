#!/usr/bin/env bash
# Make a short video with sound from the picture in this repository, on whatever this machine has.
# Own .venv, no download of weights: the tiny random model runs every stage, so the picture is noise.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/_venv.sh
venv
export OMP_NUM_THREADS=1
torchrun --nproc_per_node=1 -m runner --model tiny --task i2v \
    --input_images docs/assets/demo_cat.jpg --resize_input_images \
    --height 512 --width 768 --num_frames 25 --num_inference_steps 8 --seed 42 \
    --prompt "a cat dancing at sunset, camera slowly pans" \
    --output_directory results/demo "$@"
