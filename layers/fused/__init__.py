"""What a transformer block does to each token alone, in as few passes over memory as it takes.

tokens.py: norms, gated products; heads.py: head norms and rotary embedding; narrow.py: whole halves of a block of few
channels; pixels.py: hidden frames to bytes. reference.py defines them in plain torch: what the CPU runs, and what the
kernels are tested against.
"""
