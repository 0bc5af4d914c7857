"""Writes docs/settings.md, the table of every flag of both services, from their parsers; with `--check`, fails when it is stale."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tokenmill_executor import settings as executor_settings
from tokenmill_scheduler import settings as scheduler_settings

PAGE = Path(__file__).resolve().parent.parent / "docs" / "settings.md"

_HEAD = """# Settings

Made from the services' own parsers by `python -m tools.settings_tables`. Each flag is also an environment variable:
`--max-num-seqs` is `TOKENMILL_MAX_NUM_SEQS`. A flag wins. A mistake is answered with one sentence and exit code 2.
"""


def document() -> str:
    return _HEAD + "".join(
        f"\n## {title}\n\n" + "\n".join(_sections(parser))
        for title, parser in (
            ("Scheduler: `python -m tokenmill_scheduler`, `tokenmill serve scheduler`", scheduler_settings.parser()),
            ("Executor: `python -m tokenmill_executor`, `tokenmill serve executor`", executor_settings.parser()),
        )
    )


def _sections(parser: argparse.ArgumentParser) -> list[str]:
    lines: list[str] = []
    for group in parser._action_groups:
        rows = [_row(action) for action in group._group_actions if action.dest != "help"]
        if rows:
            lines += [f"### {group.title}\n", "| flag | default | meaning |", "|---|---|---|", *rows, ""]
    return lines


def _row(action: argparse.Action) -> str:
    # Of a switch, both ways.
    flag = "`, `".join(action.option_strings) if isinstance(action, argparse.BooleanOptionalAction) else action.option_strings[-1]
    choices = f" {', '.join(map(str, action.choices))}" if action.choices else ""
    default = "" if action.default in (None, argparse.SUPPRESS) else f"`{action.default}`"
    meaning = (action.help or "").replace("|", "\\|").replace("%%", "%")
    return f"| `{flag}`{choices} | {default} | {meaning} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    if not parser.parse_args().check:
        PAGE.write_text(document())
    elif not PAGE.exists() or PAGE.read_text() != document():
        sys.exit("docs/settings.md is stale; run `python -m tools.settings_tables`")


if __name__ == "__main__":
    main()
