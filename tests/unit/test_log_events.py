"""Every event that a service logs is named in one style, by words that do not change: people read them, and count by them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[2]
_LEVELS = ("debug", "info", "warning", "error", "critical", "exception")
# In an event's name, one of a few words: a state.
_STATE = "{record.after}"
# Words with spaces between them, and no full stop: "executor joined". What varies is a field.
_EVENT = re.compile(r"(?!.*[.!]$)[A-Za-z][^_{}%\n]*")


def _events() -> Iterator[tuple[str, str]]:
    """Where a logger is called, with the event's name; of an f-string, its source."""
    for root in ("services", "executor"):
        for path in sorted((_ROOT / root).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Call) and _is_logger(node.func):
                    for name in _names(node.args[0]):
                        yield f"{path.relative_to(_ROOT)}:{node.lineno}", name


def _names(event: ast.expr) -> list[str]:
    if isinstance(event, ast.IfExp):
        return _names(event.body) + _names(event.orelse)
    if isinstance(event, ast.Constant):
        return [str(event.value)]
    return [ast.unparse(event).removeprefix("f").strip("'").replace(_STATE, "ended")]


def _is_logger(called: ast.expr) -> bool:
    """`log.info`, `self._log.warning`, and `log`, where that was set to one of them."""
    if isinstance(called, ast.Attribute):
        return called.attr in _LEVELS and ast.unparse(called.value).endswith("log")
    return isinstance(called, ast.Name) and called.id == "log"


def test_events_are_words() -> None:
    events = list(_events())
    assert len(events) > 40
    assert [(where, name) for where, name in events if not _EVENT.fullmatch(name)] == []


@pytest.mark.parametrize("name", ["metrics_served", "metrics served.", "{n} metrics served", ""])
def test_other_styles_are_found(name: str) -> None:
    assert not _EVENT.fullmatch(name)
