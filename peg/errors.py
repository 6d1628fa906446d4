"""The whole error tree on one page.

PegError
├── UsageError            the process was asked for something it cannot do: exit code 2
│   ├── ConfigError           a flag or a combination of flags
│   └── CheckpointError       a model directory, file or name; carries every fault found
├── RequestError          one request was refused; nothing else notices
│   ├── InvalidRequest        the request itself is at fault (HTTP 400)
│   ├── QueueFull             the waiting queue is at its limit (HTTP 429)
│   └── EngineUnavailable     not READY: starting, draining, broken (HTTP 503)
└── RankError             something went wrong on a rank: engine-scoped unless `scope` says otherwise
    ├── RankDiverged          ranks disagree on sampled ids, digests or free rows
    ├── CommAborted           the communicator was aborted; blocked and later calls raise this
    ├── CommMismatch          ranks issued different collectives
    └── InjectedFault         raised by fault injection
"""

from __future__ import annotations

from collections.abc import Sequence


class PegError(Exception):
    """Base of everything peg raises on purpose."""


class UsageError(PegError):
    """The process was asked for something it cannot do. The command line prints it and exits with 2."""


class ConfigError(UsageError):
    """A flag, or a combination of flags, is out of its range. The message names flag, value and limit."""


class CheckpointError(UsageError):
    """A model directory or file is not what it must be.

    `faults` lists everything found, one line each; the message is those lines joined.
    """

    def __init__(self, subject: str, faults: Sequence[str] = ()) -> None:
        self.faults = tuple(faults)
        lines = [subject, *(f"  - {fault}" for fault in self.faults)]
        super().__init__("\n".join(lines))


class RequestError(PegError):
    """One request was refused. `param` is the path of the offending field, where there is one."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class InvalidRequest(RequestError):
    """The request itself is at fault; trying again unchanged cannot help."""


class QueueFull(RequestError):
    """The waiting queue is at its limit; trying again later can help."""


class EngineUnavailable(RequestError):
    """The engine is not READY. The message carries its state and, where it failed, the first cause."""


class RankError(PegError):
    """Something went wrong on a rank."""


class RankDiverged(RankError):
    """Ranks that must agree do not. The message names the step, the ranks and what differs."""


class CommAborted(RankError):
    """The communicator was aborted. The message is the reason given to `abort`."""


class CommMismatch(RankError):
    """Ranks issued different collectives: operation, shape or dtype."""


class InjectedFault(RankError):
    """Raised by fault injection, never otherwise."""
