"""When Python looks for garbage, and where: a collection stops every thread.

What is loaded stays, and is half a million objects: a look at all of them takes 0.2 s. Under a step of a GPU there is
no collection at all, for what it frees may be another rank's, whose allocator it would wait for with the interpreter
lock in its hands.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections.abc import Iterator

from peg.engine import Engine

_LOOK_S = 10.0
_TOO_MANY = 1_000_000


@contextlib.contextmanager
def frozen() -> Iterator[None]:
    """While the body runs, what is there now is never looked at."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


async def collect_at_rest(engine: Engine) -> None:
    """Collect only while nothing runs, or once a million objects wait."""
    gc.disable()
    try:
        while True:
            await asyncio.sleep(_LOOK_S)
            if engine.stats().open_streams == 0 or gc.get_count()[0] > _TOO_MANY:
                gc.collect()
    finally:
        gc.enable()
