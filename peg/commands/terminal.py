"""What people see on standard error: logs, and how far slow work is. Standard output belongs to results."""

from __future__ import annotations

import logging
import sys
import time
from typing import Self

import structlog
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from structlog.typing import Processor

log = structlog.get_logger("peg")

_LINE_EVERY_S = 5.0


def log_to_stderr() -> None:
    """Set logging up, once a process: lines for people on a terminal, one JSON object a line otherwise."""
    if sys.stderr.isatty():
        stamp = structlog.processors.TimeStamper(fmt="%H:%M:%S", utc=False)
        ends: list[Processor] = [structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)]
    else:
        stamp = structlog.processors.TimeStamper(fmt="iso")
        ends = [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    shared: list[Processor] = [structlog.contextvars.merge_contextvars, structlog.processors.add_log_level, stamp]
    structlog.configure(
        processors=[*shared, *ends],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
    # Libraries log through the standard library; their warnings come out in the same shape.
    unwrap = structlog.stdlib.ProcessorFormatter.remove_processors_meta
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(structlog.stdlib.ProcessorFormatter(processors=[unwrap, *ends], foreign_pre_chain=shared))
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.captureWarnings(capture=True)


class StderrProgress:
    """How far slow work on files is: a bar a stage on a terminal, a log line every few seconds otherwise.

    Owned by the thread that works; `with` gives the terminal back.
    """

    def __init__(self) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
        self._is_terminal = sys.stderr.isatty()
        self._bars = Progress(*columns, console=Console(stderr=True), disable=not self._is_terminal)
        self._stages: dict[str, TaskID] = {}
        self._line_s = time.monotonic()

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    def stage(self, name: str, done_bytes: int, total_bytes: int) -> None:
        """`done_bytes` of `total_bytes` of the stage `name` are done."""
        if name not in self._stages:
            self._stages[name] = self._bars.add_task(name)
        self._bars.update(self._stages[name], completed=done_bytes, total=total_bytes)
        now = time.monotonic()
        if not self._is_terminal and (done_bytes == total_bytes or now - self._line_s >= _LINE_EVERY_S):
            self._line_s = now
            log.info(name, done_bytes=done_bytes, total_bytes=total_bytes)

    def notice(self, message: str) -> None:
        """Something a person should read once."""
        if self._is_terminal:  # a log line would run into the bar
            self._bars.console.print(message, highlight=False)
        else:
            log.info(message)
