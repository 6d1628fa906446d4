"""The ways a process ends after a failure."""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import sys


class ProcessEnd:
    """Ends this process. Tests put a recorder in its place. Called by the supervisor's thread."""

    def arm(self, after_s: float) -> None:
        """Start the deadman anew: a C thread that needs no interpreter lock, dumps all stacks and ends with code 1."""
        faulthandler.dump_traceback_later(after_s, exit=True)

    def disarm(self) -> None:
        """Nothing is left that could hang."""
        faulthandler.cancel_dump_traceback_later()

    def exit(self, code: int) -> None:
        """End now, whatever thread did not come back."""
        logging.shutdown()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(code)
