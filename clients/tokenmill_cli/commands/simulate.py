"""`tokenmill simulate`: what the scheduler would do with a load, on machines that need not be there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from tokenmill_cli.app import App, console, output_options, pass_app
from tokenmill_cli.exits import CommandError, ExitCode
from tokenmill_cli.loads import LoadOptions, load_options, simulated_requests
from tokenmill_cli.output import facts, print_json, show
from tokenmill_cli.runs_table import runs_table

if TYPE_CHECKING:
    from tokenmill_simulator.compare import Run
    from tokenmill_simulator.presets import Preset
    from tokenmill_simulator.requests import SimulatedRequest

F = TypeVar("F", bound=Callable[..., Any])
_ABOVE_0 = click.FloatRange(min=0, min_open=True)
_AT_LEAST_1 = click.IntRange(min=1)


@dataclass(frozen=True, slots=True)
class _Options:
    preset: str
    executors: int
    compare: str
    max_num_seqs: int | None
    max_num_batched_tokens: int | None
    block_size: int | None
    kv_offloading_size: float
    settings: tuple[str, ...]
    ttft_target: float
    itl_target: float
    max_queue_len: int
    max_queue_tokens: int | None
    retries: int
    plots: Path | None


_OPTIONS = (
    click.option("--compare", default="continuous,static", show_default=True,
                 help="Policies and batching modes, with commas between them; `fcfs+watermark=0.1:4` is one with a setting "
                 "of its own, and with 4 slots."),
    click.option("--preset", default="a100-8b", show_default=True, help="The machine; `list` shows which there are."),
    click.option("--executors", type=_AT_LEAST_1, default=1, show_default=True, help="So many of it."),
    click.option("--max-num-seqs", type=_AT_LEAST_1, help="Slots; without it, the preset's."),
    click.option("--max-num-batched-tokens", type=_AT_LEAST_1, help="Most tokens in a step; without it, the preset's."),
    click.option("--block-size", type=_AT_LEAST_1, help="Tokens in a KV block; without it the preset's, or the trace's."),
    click.option("--kv-offloading-size", type=click.FloatRange(min=0), default=0.0, show_default=True, help="GiB of host memory of "
                 "each machine, for blocks that its prefix cache has no room for."),
    click.option("--set", "settings", multiple=True, metavar="FIELD=VALUE", help="Any other setting of the scheduler's core, or "
                 "a part of one: `lane_shares.batch=20`, `weights.tenant-1=3`, `overload.queue_delay_s=5`."),
    click.option("--max-queue-len", type=_AT_LEAST_1, default=10_000, show_default=True, help="More requests are refused."),
    click.option("--max-queue-tokens", type=_AT_LEAST_1, help="And more tokens, prompts and outputs; without it, no limit."),
    click.option("--retries", type=click.IntRange(min=0), default=0, show_default=True, help="How often who is refused comes "
                 "again, after the delay that it is told."),
    click.option("--ttft-target", type=_ABOVE_0, default=1.0, show_default=True, help="Served well: seconds to the first token."),
    click.option("--itl-target", type=_ABOVE_0, default=0.1, show_default=True, help="And mean seconds between tokens."),
    click.option("--plots", type=click.Path(path_type=Path, file_okay=False), metavar="DIR", help="Draw them, into this folder."),
)  # fmt: skip


def _run_options(function: F) -> F:
    for option in reversed(_OPTIONS):
        function = option(function)
    return function


@click.command()
@_run_options
@load_options
@output_options
@pass_app
def simulate(app: App, **values: Any) -> None:
    """Predict what policies and limits do to a load.

    The scheduler's own code against model executors under a virtual clock: an hour of load takes seconds.

    \b
      tokenmill simulate --compare static,continuous --max-num-seqs 8
      tokenmill simulate --trace conversation.csv.gz --compare fcfs,sjf --preset h100-8b --scale 1.5 --plots plots/
    """
    options = _Options(**{name: values.pop(name) for name in _Options.__slots__})
    load = LoadOptions(**values)
    needs_simulator()
    from tokenmill_simulator.presets import PRESETS, preset

    if options.preset == "list":
        _show_presets(app, [preset(name) for name in PRESETS])
        return
    if options.preset not in PRESETS:
        raise CommandError(f"There is no preset {options.preset!r}, but {', '.join(PRESETS)}.", ExitCode.USAGE)
    chosen, requests = preset(options.preset), simulated_requests(load)
    runs = _runs(chosen, requests, options)
    title = f"{load.name}: {len(requests):,} requests on {options.executors} × {options.preset}"
    present(app, title, chosen.about, runs, options.plots)


def _runs(chosen: Preset, requests: list[SimulatedRequest], options: _Options) -> list[Run]:
    from tokenmill_scheduler.core.backlog import QueueLimits
    from tokenmill_simulator.compare import candidate, machines, run
    from tokenmill_simulator.entrance import Admittance
    from tokenmill_simulator.figures import Target
    from tokenmill_simulator.settings import configured

    with _naming("--kv-offloading-size"):
        on = machines(chosen, requests, options.executors, options.block_size, options.kv_offloading_size)
    target = Target(options.ttft_target, options.itl_target)
    admittance = Admittance(QueueLimits(options.max_queue_len, options.max_queue_tokens), options.retries)
    with _naming("--set"):
        base = configured(on.config(options.max_num_seqs, options.max_num_batched_tokens), options.settings)
    with _naming("--compare"):
        configs = {name.strip(): candidate(name.strip(), base) for name in options.compare.split(",")}
    return [run(name, config, requests, on, target, admittance=admittance) for name, config in configs.items()]


@contextmanager
def _naming(option: str) -> Iterator[None]:
    """Says which option it was that made no sense."""
    try:
        yield
    except ValueError as error:
        raise CommandError(f"{option}: {error}.", ExitCode.USAGE) from error


def needs_simulator() -> None:
    """Raises CommandError where numpy is not installed."""
    try:
        import tokenmill_simulator.compare  # noqa: F401
    except ImportError as error:
        raise CommandError(f"Simulations need {error.name}, which is missing: pip install 'tokenmill[simulator]'.") from error


def present(app: App, title: str, about: str, runs: list[Run], plots: Path | None) -> None:
    """One table, or one JSON document; and pictures, if `plots` names a folder for them."""
    files = _draw(title, runs, plots) if plots is not None else []
    if app.json:
        documents = [{"name": run.name, "config": run.config, "figures": run.figures} for run in runs]
        print_json({"load": title, "machine": about, "runs": documents, "plots": [str(path) for path in files]})
        return
    screen = console()
    screen.print(f"[bold]{title}[/bold]\n{about}\n")
    show(screen, runs_table(runs))
    for path in files:
        click.echo(f"Wrote {path}")


def _draw(title: str, runs: list[Run], folder: Path) -> list[Path]:
    try:
        from tokenmill_simulator.plots import write_plots
    except ImportError as error:
        raise CommandError(f"Plots need {error.name}, which is missing: pip install 'tokenmill[plots]'.") from error
    try:
        return write_plots(title, runs, folder)
    except OSError as error:
        raise CommandError(f"{folder} cannot be written: {error.strerror}.", ExitCode.USAGE) from error


def _show_presets(app: App, presets: list[Preset]) -> None:
    if app.json:
        print_json(presets)
    else:
        show(console(), facts([(preset.name, preset.about) for preset in presets]))
