"""Options that say which load is simulated, the requests they make, and recorded ones. Must not know: what is done with them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from tokenmill_workloads import FIXED, Arrival, Columns, TraceError, at_rate, burst, poisson, read_trace, scale_lengths

from tokenmill_cli.exits import CommandError, ExitCode

if TYPE_CHECKING:
    from tokenmill_simulator.requests import SimulatedRequest

F = TypeVar("F", bound=Callable[..., Any])
_ABOVE_0 = click.FloatRange(min=0, min_open=True)
_AT_LEAST_1 = click.IntRange(min=1)


class _Range(click.ParamType[tuple[int, int]]):
    """`LOW-HIGH`, or one number for both."""

    name = "range"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, int]:
        low, _, high = str(value).partition("-")
        if not (low.isdigit() and (high or low).isdigit() and 1 <= int(low) <= int(high or low)):
            self.fail(f"{value!r} is not a range such as 10-100", param, ctx)
        return int(low), int(high or low)


class _Shares(click.ParamType[tuple[float, ...]]):
    """Three numbers with commas between them."""

    name = "shares"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[float, ...]:
        try:
            shares = tuple(float(part) for part in str(value).split(","))
        except ValueError:
            shares = ()
        if len(shares) != 3 or min(shares) < 0 or sum(shares) <= 0:
            self.fail(f"{value!r} is not three shares such as 20,60,20", param, ctx)
        return shares


@dataclass(frozen=True, slots=True)
class LoadOptions:
    trace: Path | None
    columns: tuple[str, str, str] | None
    time_unit: float
    workload: str
    count: int
    prompt_tokens: tuple[int, int]
    output_tokens: tuple[int, int]
    as_poisson: bool
    limit: int | None
    rate: float | None
    scale: float
    length_scale: float
    lanes: tuple[float, ...] | None
    tenants: int
    priorities: tuple[int, ...]
    deadlines: tuple[float, ...]
    max_tokens: int | None
    seed: int

    @property
    def name(self) -> str:
        return self.workload if self.trace is None else self.trace.name


_OPTIONS = (
    click.option("--trace", type=click.Path(path_type=Path, dir_okay=False), help="CSV or JSON lines, plain or gzipped; the traces "
                 "of Azure LLM inference and of Mooncake are recognised."),
    click.option("--columns", nargs=3, metavar="TIME PROMPT OUTPUT", help="Of any other trace: its columns with the time (a date, "
                 "or a number of --time-unit), prompt tokens and output tokens."),
    click.option("--time-unit", type=_ABOVE_0, default=1.0, help="Seconds in a unit of the trace's times."),
    click.option("--workload", type=click.Choice(tuple(FIXED)), default="burst", show_default=True, help="Without a trace."),
    click.option("--count", type=_AT_LEAST_1, default=20, show_default=True, help="Requests of the burst."),
    click.option("--prompt-tokens", type=_Range(), default="10-100", show_default=True, help="Of the burst's requests."),
    click.option("--output-tokens", type=_Range(), default="20-200", show_default=True, help="Of the burst's requests."),
    click.option("--poisson", "as_poisson", is_flag=True, help="The same requests as a Poisson process of --rate."),
    click.option("--limit", type=_AT_LEAST_1, help="Only the first so many requests."),
    click.option("--rate", type=_ABOVE_0, help="Requests a second; all gaps of a trace are stretched or shrunk by one factor."),
    click.option("--scale", type=_ABOVE_0, default=1.0, show_default=True, help="So many times as many requests a second."),
    click.option("--length-scale", type=_ABOVE_0, default=1.0, show_default=True, help="Multiplies prompts and outputs."),
    click.option("--lanes", type=_Shares(), metavar="R,S,B", help="Shares of the lanes real-time, standard and batch, drawn."),
    click.option("--tenants", type=_AT_LEAST_1, default=1, show_default=True, help="Tenants, drawn."),
    click.option("--priority", "priorities", type=int, multiple=True, help="Of the requests; of several, one is drawn."),
    click.option("--deadline", "deadlines", type=_ABOVE_0, multiple=True, metavar="SECONDS", help="From a request's arrival; of "
                 "several, one is drawn."),
    click.option("--max-tokens", type=_AT_LEAST_1, help="What clients ask for at most; without it, just what is made."),
    click.option("--seed", default=42, show_default=True, help="Draws whatever is drawn."),
)  # fmt: skip


def load_options(function: F) -> F:
    """All of LoadOptions."""
    for option in reversed(_OPTIONS):
        function = option(function)
    return function


def simulated_requests(options: LoadOptions) -> list[SimulatedRequest]:
    """At least one. Raises CommandError for a trace that is none, UsageError for options that do not go together."""
    from tokenmill_simulator.requests import Mix, mixed

    arrivals = scale_lengths(_arrivals(options)[: options.limit], options.length_scale)
    if options.as_poisson:
        if options.rate is None:
            raise click.UsageError("--poisson needs a --rate.")
        arrivals = poisson(arrivals, options.rate * options.scale, options.seed)
    elif (rate := _rate(arrivals, options)) is not None:
        arrivals = at_rate(arrivals, rate)
    return mixed(
        arrivals, Mix(options.lanes, options.tenants, options.priorities, options.deadlines, options.max_tokens), options.seed
    )


def _arrivals(options: LoadOptions) -> tuple[Arrival, ...]:
    if options.trace is not None:
        return recorded(options.trace, options.columns, options.time_unit, options.limit)
    if options.workload == "burst":
        return burst(options.count, seed=options.seed, prompt_tokens=options.prompt_tokens, output_tokens=options.output_tokens)
    return FIXED[options.workload]()


def recorded(path: Path, columns: tuple[str, str, str] | None, time_unit_s: float, limit: int | None) -> tuple[Arrival, ...]:
    """A trace's arrivals, or the first so many. Raises CommandError when there are none, or it cannot be read."""
    try:
        arrivals = read_trace(path, columns and Columns(*columns, time_unit_s=time_unit_s), limit)
    except OSError as error:
        raise CommandError(f"{path} cannot be read: {error.strerror}.", ExitCode.USAGE) from error
    except TraceError as error:
        raise CommandError(f"{error}.", ExitCode.USAGE) from error
    if not arrivals:
        raise CommandError(f"{path} has no requests.", ExitCode.USAGE)
    return arrivals


def _rate(arrivals: tuple[Arrival, ...], options: LoadOptions) -> float | None:
    """Requests a second that are asked for; None to leave the times as they are."""
    span_s = arrivals[-1].at_s - arrivals[0].at_s
    if not span_s or (options.rate is None and options.scale == 1):
        return None
    return (options.rate or (len(arrivals) - 1) / span_s) * options.scale
