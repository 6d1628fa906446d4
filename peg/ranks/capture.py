"""Capturing what a rank's thread launches."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch


def capture(work: Callable[[], object], pool: Any = None) -> torch.cuda.CUDAGraph:
    """What `work` launches on this thread's stream, as a graph; nothing of it runs.

    Other threads may use the GPU meanwhile, but none may wait for it. Memory comes from `pool` where one is given.
    PyTorch's own helper synchronises, collects garbage and captures on a stream that all threads share.
    """
    graph = torch.cuda.CUDAGraph()
    collects = gc.isenabled()
    gc.disable()  # what it frees may be another rank's, whose stream is not the one that is captured
    try:
        graph.capture_begin(pool, "thread_local")
        try:
            work()
        finally:
            graph.capture_end()
    finally:
        if collects:
            gc.enable()
    return graph


def is_capturing() -> bool:
    """Whether what this thread launches is being captured."""
    return torch.version.cuda is not None and torch.cuda.is_current_stream_capturing()
