"""Structured logs to standard error: for people (console) or for machines (json). No prompt and no output is ever logged."""

from __future__ import annotations

import logging
import sys
from typing import Any

import structlog


def configure_logs(log_format: str, level: str) -> None:
    """`log_format` is "console" or "json", `level` a name of the logging module in lower case. Steps are logged at debug only."""
    colors = sys.stderr.isatty()
    renderer: list[Any] = (
        [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
        if log_format == "json"
        # Plain: the default shows the local variables of every frame, prompts and whole arrays among them.
        else [structlog.dev.ConsoleRenderer(colors=colors, exception_formatter=structlog.dev.plain_traceback)]
    )
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            *renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        logger_factory=structlog.WriteLoggerFactory(sys.stderr),
    )
