"""Conditions on requests as command-line options."""

from __future__ import annotations

import re
from collections.abc import Callable
from enum import StrEnum
from itertools import chain
from typing import Any, TypeVar

import click
from click.shell_completion import CompletionItem
from tokenmill_client import Lane, RequestFilter, RequestState
from tokenmill_client.records import named

E = TypeVar("E", bound=StrEnum)
F = TypeVar("F", bound=Callable[..., Any])

_SECONDS = {"": 1, "s": 1, "m": 60, "h": 3_600, "d": 86_400}


class Age(click.ParamType[float]):
    """A duration in seconds, or with a unit."""

    name = "AGE"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd]?)", str(value))
        if match is None:
            self.fail(f"{value!r} is no age such as 90s, 15m, 2h or 1d", param, ctx)
        return float(match[1]) * _SECONDS[match[2]]


class Words(click.ParamType[tuple[E, ...]]):
    """Members of an enumeration, in upper or lower case, with commas between them."""

    def __init__(self, kind: type[E], name: str) -> None:
        self._kind = kind
        self.name = name

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[E, ...]:
        try:
            return tuple(named(self._kind, word) for word in str(value).split(","))
        except ValueError as error:
            self.fail(str(error), param, ctx)

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Of the last word; those before it stay."""
        before, comma, last = incomplete.rpartition(",")
        return [CompletionItem(f"{before}{comma}{word}") for word in self._kind if word.startswith(last.lower())]


def filter_options(function: F) -> F:
    """The conditions, as keyword arguments for `request_filter`."""
    for option in reversed(
        (
            click.option("--state", "states", type=Words(RequestState, "STATE"), multiple=True, metavar="STATE,…",
                         help=f"In one of these states: {', '.join(RequestState)}."),
            click.option("--tenant", default="", help="Of this tenant."),
            click.option("--model", default="", help="For this model."),
            click.option("--lane", "lanes", type=Words(Lane, "LANE"), multiple=True, metavar="LANE,…",
                         help=f"In one of these lanes: {', '.join(Lane)}."),
            click.option("--priority-min", "min_priority", type=int, help="Of at least this priority."),
            click.option("--priority-max", "max_priority", type=int, help="Of at most this priority."),
            click.option("--min-age", type=Age(), help="Accepted at least so long ago: 90, 90s, 15m, 2h, 1d."),
        )
    ):  # fmt: skip
        function = option(function)
    return function


def request_filter(
    states: tuple[tuple[RequestState, ...], ...],
    tenant: str,
    model: str,
    lanes: tuple[tuple[Lane, ...], ...],
    min_priority: int | None,
    max_priority: int | None,
    min_age: float | None,
) -> RequestFilter:
    return RequestFilter(
        tuple(chain.from_iterable(states)),
        tenant,
        min_priority,
        max_priority,
        model,
        tuple(chain.from_iterable(lanes)),
        min_age,
    )
