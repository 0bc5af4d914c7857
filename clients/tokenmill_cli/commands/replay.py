"""`tokenmill replay`: does the core decide what a plan journal says it did, and what would another policy have done?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tokenmill_cli.app import App, console, output_options, pass_app
from tokenmill_cli.commands.simulate import needs_simulator, present
from tokenmill_cli.exits import CommandError, ExitCode
from tokenmill_cli.output import facts, print_json, show

if TYPE_CHECKING:
    from tokenmill_scheduler.journal.replay import Difference, Observer, Replay
    from tokenmill_simulator.recording import Recording

_ABOVE_0 = click.FloatRange(min=0, min_open=True)


@click.command()
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
@click.option("--policy", "policies", metavar="NAME,…", help="Show what these policies and batching modes would have done.")
@click.option("--ttft-target", type=_ABOVE_0, default=1.0, show_default=True, help="Served well: seconds to the first token.")
@click.option("--itl-target", type=_ABOVE_0, default=0.1, show_default=True, help="And mean seconds between tokens.")
@click.option("--plots", type=click.Path(path_type=Path, file_okay=False), metavar="DIR", help="Draw them, into this folder.")
@output_options
@pass_app
def replay(app: App, file: Path, policies: str | None, ttft_target: float, itl_target: float, plots: Path | None) -> int:
    """Run the core over FILE, a plan journal.

    Shows that it decides the same, byte for byte, or where the first difference is (exit code 1). FILE is what a scheduler wrote
    with --plan-journal.

    With --policy, the recorded requests are simulated: executors' answers cannot be replayed under other plans, so the cost of a
    step is fitted to the times in the journal. The column `recorded` is what was measured.
    """
    if policies is None:
        return _compare(app, _replay(file))
    needs_simulator()
    from tokenmill_simulator.figures import Target
    from tokenmill_simulator.recording import Recording

    recording = Recording()
    replayed = _replay(file, lambda core, at_s, event, effects: recording.saw(at_s, event, effects, core.num_waiting))
    if replayed.difference is not None:
        return _compare(app, replayed)
    try:
        _what_if(app, file, replayed, recording, policies, Target(ttft_target, itl_target), plots)
    except ValueError as error:
        raise CommandError(f"{file} cannot be simulated: {error}.", ExitCode.USAGE) from error
    return ExitCode.OK


def _replay(file: Path, observer: Observer | None = None) -> Replay:
    """Needs the standard library only. Raises CommandError for a file that is no journal."""
    from tokenmill_scheduler.journal.lines import JournalError
    from tokenmill_scheduler.journal.replay import replay as run_core

    try:
        return run_core(file, observer)
    except OSError as error:
        raise CommandError(f"{file} cannot be read: {error.strerror}.", ExitCode.USAGE) from error
    except JournalError as error:
        raise CommandError(f"{file} cannot be replayed: {error}.", ExitCode.USAGE) from error


def _compare(app: App, replayed: Replay) -> int:
    difference = replayed.difference
    _warn(replayed)
    if app.json:
        print_json(
            {
                "events": replayed.events,
                "plans": replayed.plans,
                "same": difference is None,
                "missing_events": replayed.missing,
                "full": replayed.full,
                "difference": None if difference is None else _document(difference),
            }
        )
    elif difference is None:
        click.echo(f"{replayed.events:,} events, {replayed.plans:,} plans: the core decides the same, byte for byte.")
    else:
        _show(replayed, difference)
    return ExitCode.OK if difference is None else ExitCode.FAILURE


def _warn(replayed: Replay) -> None:
    """Of what is not in the journal."""
    if replayed.missing:
        click.echo(f"The journal lacks the next {replayed.missing:,} events: what came later is left out.", err=True)
    if replayed.full:
        click.echo("The journal is full: what came later is not in it.", err=True)


def _show(replayed: Replay, difference: Difference) -> None:
    entry = difference.entry
    click.echo(
        f"Event {entry.number:,} of the journal is the first that leads to something else; {replayed.events - 1:,} are the same."
    )
    rows = [("event", f"{type(entry.event).__name__} at {entry.at_s:.6f}")]
    rows += [("expected", line) for line in (*entry.led_to, f"digest {entry.digest}")]
    rows += [("got", line) for line in (*difference.got, f"digest {difference.got_digest}")]
    show(console(), facts(rows))


def _document(difference: Difference) -> dict[str, Any]:
    entry = difference.entry
    return {
        "event_number": entry.number,
        "at_s": entry.at_s,
        "event": type(entry.event).__name__,
        "expected": {"effects": entry.led_to, "digest": entry.digest},
        "got": {"effects": difference.got, "digest": difference.got_digest},
    }


def _what_if(app: App, file: Path, replayed: Replay, recording: Recording, policies: str, target: Any, plots: Path | None) -> None:
    """Raises ValueError when the journal has too little in it, or for a policy that there is not."""
    from tokenmill_simulator.compare import candidate, run

    _warn(replayed)
    requests, on, rules = recording.requests(), recording.machines(), recording.rules()
    base = recording.config(replayed.config)
    configs = {"as it was": base} | {name.strip(): candidate(name.strip(), base) for name in policies.split(",")}
    runs = [
        recording.run(base, replayed.counters, target),
        *(run(n, config, requests, on, target, rules) for n, config in configs.items()),
    ]
    fitted = recording.fit()
    about = (
        f"{on.count} × {on.description.name}; a step's cost fitted to {fitted.steps:,} recorded steps, "
        f"off by {fitted.error:.0%} of a step; {fitted.outliers:,} that were held up are left out"
    )
    present(app, f"{file.name}: {len(requests):,} requests, {replayed.events:,} events", about, runs, plots)
