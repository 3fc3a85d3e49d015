"""Other runners of the same model, for bench_e2e.py: the stock diffusers pipelines and xfuser's runner classes."""
