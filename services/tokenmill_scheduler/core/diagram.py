"""The request states as a Mermaid diagram, drawn from `TRANSITIONS` so that it cannot disagree with it."""

from __future__ import annotations

from tokenmill_scheduler.core.request import TERMINAL, TRANSITIONS, State

_HEAD = """# Request states

Drawn from the table in `services/tokenmill_scheduler/core/request.py`; `python -m tokenmill_scheduler.core.diagram` prints it.

```mermaid
"""


def mermaid() -> str:
    """A stateDiagram-v2: every legal move, in the order of the states."""
    lines = ["stateDiagram-v2", f"    [*] --> {State.WAITING}"]
    lines += [f"    {before} --> {after}" for before in State for after in State if after in TRANSITIONS[before]]
    lines += [f"    {state} --> [*]" for state in State if state in TERMINAL]
    return "\n".join(lines) + "\n"


def document() -> str:
    """docs/request-states.md."""
    return _HEAD + mermaid() + "```\n"


if __name__ == "__main__":
    print(document(), end="")
