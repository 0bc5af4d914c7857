"""`tokenmill bench`: a workload sent to a running server, its figures, and comparisons of what was measured."""

from __future__ import annotations

import collections
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from tokenmill_service.event_loop import new_runner
from tokenmill_workloads import FIXED, Arrival, at_rate, poisson, scale_lengths

from tokenmill_cli.app import App, console, output_options, pass_app, server_options
from tokenmill_cli.bench.figures import figures
from tokenmill_cli.bench.measurements import Measurement, read, save
from tokenmill_cli.bench.runner import TargetError
from tokenmill_cli.bench.session import Spec, measure, openai_style, scheduler
from tokenmill_cli.bench.tables import comparison, latency_table, throughput
from tokenmill_cli.exits import CommandError, ExitCode
from tokenmill_cli.loads import recorded
from tokenmill_cli.output import facts, print_json, show

_SHOWN_FAILURES = 3
_POSITIVE = click.FloatRange(min=0, min_open=True)
_FILE = click.Path(dir_okay=False, path_type=Path)


@dataclass(frozen=True, slots=True)
class _Options:
    """What every workload takes."""

    rate: float | None
    limit: int | None
    length_scale: float
    seed: int
    repeat: int
    warmup: int
    label: str
    save: Path | None
    base_url: str
    model: str
    vocab_size: int

    def shortened(self, arrivals: Sequence[Arrival]) -> tuple[Arrival, ...]:
        return scale_lengths(arrivals[: self.limit], self.length_scale)


_OPTIONS = (
    click.option("--rate", type=_POSITIVE, help="Requests a second, on average."),
    click.option("--limit", type=click.IntRange(min=1), help="Only the first so many requests."),
    click.option("--length-scale", type=_POSITIVE, default=1.0, help="Multiplies the tokens of all prompts and outputs."),
    click.option("--seed", default=42, show_default=True, help="Draws prompts and arrivals; each run has its own prompts."),
    click.option("--repeat", type=click.IntRange(min=1), default=1, show_default=True, help="Runs; figures are their medians."),
    click.option("--warmup", type=click.IntRange(min=0), default=1, show_default=True, help="Short requests sent before."),
    click.option("--save", type=_FILE, help="Keep all times in a JSON file, for `tokenmill bench compare`."),
    click.option("--label", default="", help="What `compare` calls it; without one, the file's name."),
    click.option("--base-url", default="", metavar="URL", help="An OpenAI-style server instead, as http://host:8000/v1."),
    click.option("--model", default="", help="Which of the server's models; without it, the first."),
    click.option("--vocab-size", type=click.IntRange(min=2), default=32_000, help="For --base-url: token ids are below it."),
)


def _workload_options(command: Callable[..., Any]) -> Callable[..., Any]:
    for option in reversed(_OPTIONS):
        command = option(command)
    return server_options(command)


@click.group()
def bench() -> None:
    """Measure a running server.

    Sends a workload of requests with exact lengths; shows tokens per second and latency percentiles, and keeps them.

    \b
      tokenmill bench burst --repeat 3 --save before.json
      tokenmill bench trace conversation.csv.gz --rate 2 --limit 200
      tokenmill bench compare before.json after.json --plots plots/
    """


def _fixed(name: str, make: Callable[[], tuple[Arrival, ...]]) -> click.Command:
    @_workload_options
    @pass_app
    def command(app: App, **values: Any) -> int:
        options = _Options(**values)
        arrivals = options.shortened(make())
        if options.rate is not None:
            arrivals = poisson(arrivals, options.rate, options.seed)
        return _run(app, name, arrivals, options)

    about = (make.__doc__ or "").partition("\n")[0]
    return click.command(name, help=f"{about}\n\nAll come at once; with --rate they are a Poisson process.")(command)


for _name, _make in FIXED.items():
    bench.add_command(_fixed(_name, _make))


@bench.command()
@click.argument("file", type=_FILE)
@click.option("--poisson", "as_poisson", is_flag=True, help="Lengths of the trace, arrivals of a Poisson process of --rate.")
@click.option(
    "--columns",
    nargs=3,
    metavar="TIME PROMPT OUTPUT",
    help="Names of the columns with the time (a date, or a number of --time-unit), prompt tokens and output tokens.",
)
@click.option("--time-unit", type=_POSITIVE, default=1.0, help="Seconds in a unit of the trace's times.")
@_workload_options
@pass_app
def trace(app: App, file: Path, as_poisson: bool, columns: tuple[str, str, str] | None, time_unit: float, **values: Any) -> int:
    """Requests as recorded in FILE: CSV or JSON lines, plain or gzipped.

    Recognises the traces of Azure LLM inference and of Mooncake. With --rate, all gaps are stretched or shrunk by one factor.
    """
    options = _Options(**values)
    arrivals = recorded(file, columns, time_unit, options.limit)
    if as_poisson and options.rate is None:
        raise click.UsageError("--poisson needs a --rate.")
    arrivals = options.shortened(arrivals)
    if options.rate is not None:
        arrivals = poisson(arrivals, options.rate, options.seed) if as_poisson else at_rate(arrivals, options.rate)
    return _run(app, file.name, arrivals, options)


def _run(app: App, workload: str, arrivals: tuple[Arrival, ...], options: _Options) -> int:
    spec = Spec(workload, arrivals, options.rate, options.seed, options.repeat, options.warmup, options.label)
    try:
        with new_runner() as runner:
            measured = runner.run(_measure(app, spec, options))
    except TargetError as error:
        raise CommandError(f"{error}.", ExitCode.UNAVAILABLE) from error
    if options.save is not None:
        save(measured, options.save)
    _show(app, measured)
    failures = [failure for run in measured.runs for failure in run.failures]
    for failure, count in collections.Counter(failures).most_common(_SHOWN_FAILURES):
        click.echo(f"{count} × {failure}", err=True)
    return ExitCode.FAILURE if failures else ExitCode.OK


async def _measure(app: App, spec: Spec, options: _Options) -> Measurement:
    if options.base_url:
        reached = openai_style(options.base_url, options.model, options.vocab_size)
    else:
        reached = scheduler(app.async_client(), options.model)
    async with reached as server:
        return await measure(server, spec, console())


def _show(app: App, measured: Measurement) -> None:
    found = figures(measured.runs)
    if app.json:
        print_json(found)
        return
    screen = console()
    rate = "" if measured.rate is None else f", {measured.rate:g} requests/s"
    show(
        screen,
        facts(
            [
                ("workload", f"{measured.workload}{rate}"),
                ("target", f"{measured.target}, {measured.model}"),
                ("runs", f"{len(measured.runs)}, medians"),
                *throughput(found),
            ]
        ),
    )
    screen.print()
    show(screen, latency_table(found))


@bench.command()
@click.argument("files", nargs=-1, required=True, type=_FILE)
@click.option("--plots", type=click.Path(file_okay=False, path_type=Path), help="Draw them, into this folder.")
@output_options
@pass_app
def compare(app: App, files: tuple[Path, ...], plots: Path | None) -> None:
    """FILES that --save wrote, side by side; the first is what others are compared with."""
    measurements = [read(file) for file in files]
    labels = [measured.label or file.stem for measured, file in zip(measurements, files, strict=True)]
    found = [figures(measured.runs) for measured in measurements]
    if app.json:
        print_json([{"label": label, "figures": measured} for label, measured in zip(labels, found, strict=True)])
    else:
        show(console(), comparison(labels, found))
    if len({measured.workload for measured in measurements}) > 1:
        click.echo("These are different workloads: only their latencies' shapes can be compared.", err=True)
    if plots is not None:
        _draw(labels, measurements, plots)


def _draw(labels: Sequence[str], measurements: Sequence[Measurement], folder: Path) -> None:
    if importlib.util.find_spec("matplotlib") is None:
        raise CommandError("--plots needs packages that are not installed: pip install 'tokenmill[plots]'.")
    from tokenmill_cli.bench.plots import draw

    try:
        for path in draw(labels, measurements, folder):
            click.echo(path, err=True)
    except OSError as error:
        raise CommandError(f"{folder} cannot be written: {error.strerror}.") from error
