"""How slow work on files tells its caller where it is. The command line draws a bar, tests take `Silent`."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """Called on the thread that does the work."""

    def stage(self, name: str, done_bytes: int, total_bytes: int) -> None:
        """`done_bytes` of `total_bytes` of the stage `name` are done."""

    def notice(self, message: str) -> None:
        """Something a person should read once."""


class Silent:
    """Tells nobody."""

    def stage(self, name: str, done_bytes: int, total_bytes: int) -> None:
        pass

    def notice(self, message: str) -> None:
        pass
