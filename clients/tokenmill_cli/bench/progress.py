"""A workload's run, live: one line with a bar."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from tokenmill_cli.bench.runner import Tally, Workload


@contextmanager
def live(screen: Console, name: str, workload: Workload) -> Iterator[Callable[[Tally], None]]:
    """On a terminal; nothing into a pipe."""
    if not screen.is_terminal:
        yield lambda tally: None
        return
    columns = (
        TextColumn(f"{name:<10}"),
        BarColumn(bar_width=30),
        TextColumn("{task.completed}/{task.total} tokens, {task.fields[state]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=screen, transient=True) as progress:
        task = progress.add_task("", total=workload.output_tokens, state="")

        def on_progress(tally: Tally) -> None:
            running = f"{tally.running} running, " if tally.samples else ""
            failed = f", {len(tally.failures)} failed" if tally.failures else ""
            state = f"{running}{tally.finished} of {len(workload.arrivals)} done{failed}"
            progress.update(task, completed=tally.output_tokens, state=state)

        yield on_progress
