"""Two worker processes: one in which Triton interprets kernels, one in which it compiles them.

Triton decides when it is first imported, so the two cannot share a process, nor the one pytest runs in.
"""

import multiprocessing
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pytest


def _worker(interpret: str) -> ProcessPoolExecutor:
    before = os.environ.get("TRITON_INTERPRET")
    os.environ["TRITON_INTERPRET"] = interpret
    try:
        pool = ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))
        pool.submit(os.getpid).result()  # the process starts here, with this environment
    finally:
        if before is None:
            del os.environ["TRITON_INTERPRET"]
        else:
            os.environ["TRITON_INTERPRET"] = before
    return pool


@pytest.fixture(scope="session")
def interpreted() -> Iterator[Callable[..., Any]]:
    """interpreted(f, *args, **kwargs): f's result, computed where Triton runs kernels in Python on the CPU."""
    pytest.importorskip("triton")
    with _worker("1") as pool:
        yield lambda f, *args, **kwargs: pool.submit(f, *args, **kwargs).result()


@pytest.fixture(scope="session")
def compiling() -> Iterator[Callable[..., Any]]:
    """compiling(f, *args, **kwargs): f's result, computed where Triton compiles kernels."""
    pytest.importorskip("triton")
    with _worker("0") as pool:
        yield lambda f, *args, **kwargs: pool.submit(f, *args, **kwargs).result()
