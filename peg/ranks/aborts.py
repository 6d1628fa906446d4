"""The helpers that abort communicators: one thread for each, so that one that hangs holds up none."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Iterable

from peg.failure import Cause, CauseKind, FailureCallback
from peg.ranks.clock import join_all
from peg.ranks.faults import RankComm


class Aborts:
    """The aborts of one epoch's communicators, each once. Made by any thread; every helper ends by itself."""

    def __init__(self, comms: Iterable[RankComm], reason: str, on_failure: FailureCallback) -> None:
        self._reason = reason
        self._on_failure = on_failure
        self._failed = False
        self.threads = tuple(
            threading.Thread(target=self._abort, args=(comm,), name=f"peg-abort-{comm.rank}", daemon=False)
            for comm in comms
        )
        for helper in self.threads:
            helper.start()

    def wait(self, deadline_s: float) -> bool:
        """Whether all have come back in time, and have done it."""
        return join_all(self.threads, deadline_s) and not self._failed

    def _abort(self, comm: RankComm) -> None:
        """A helper's whole life. Where it fails its rank may never come back: that is told."""
        try:
            comm.abort(self._reason)
        except Exception as error:  # a helper that dies in silence would pass for one that is done
            self._failed = True
            self._on_failure(
                Cause(
                    kind=CauseKind.SUPERVISOR_FAILED,
                    message=f"the abort of the communicator of rank {comm.rank} failed: {error!r}",
                    rank=comm.rank,
                    traceback=traceback.format_exc(),
                )
            )
