"""When Python looks for garbage while GPUs work: not under a step.

A collection stops every thread, and what it frees may be another rank's, whose allocator it would wait for with the
interpreter lock in its hands.
"""

from __future__ import annotations

import asyncio
import gc

from peg.engine import Engine

_LOOK_S = 10.0
_TOO_MANY = 1_000_000


async def collect_at_rest(engine: Engine) -> None:
    """Collect only while nothing runs, or once a million objects wait. What is there now is never looked at again."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        while True:
            await asyncio.sleep(_LOOK_S)
            if engine.stats().open_streams == 0 or gc.get_count()[0] > _TOO_MANY:
                gc.collect()
    finally:
        gc.enable()
        gc.unfreeze()
