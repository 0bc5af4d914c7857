"""Conditions on requests as command-line options."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, TypeVar

import click
from tokenmill_client import Lane, RequestFilter, RequestState

F = TypeVar("F", bound=Callable[..., Any])

_STATES = [state.value for state in RequestState]
_LANES = [lane.value for lane in Lane]
_SECONDS = {"": 1, "s": 1, "m": 60, "h": 3_600, "d": 86_400}


class Age(click.ParamType[float]):
    """A duration in seconds, or with a unit."""

    name = "AGE"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd]?)", str(value))
        if match is None:
            self.fail(f"{value!r} is no age such as 90s, 15m, 2h or 1d", param, ctx)
        return float(match[1]) * _SECONDS[match[2]]


def filter_options(function: F) -> F:
    """The conditions, as keyword arguments for `request_filter`."""
    for option in reversed(
        (
            click.option("--state", "states", type=click.Choice(_STATES), multiple=True, help="In this state; repeatable."),
            click.option("--tenant", default="", help="Of this tenant."),
            click.option("--model", default="", help="For this model."),
            click.option("--lane", "lanes", type=click.Choice(_LANES), multiple=True, help="In this lane; repeatable."),
            click.option("--priority-min", "min_priority", type=int, help="Of at least this priority."),
            click.option("--priority-max", "max_priority", type=int, help="Of at most this priority."),
            click.option("--min-age", type=Age(), help="Accepted at least so long ago: 90, 90s, 15m, 2h, 1d."),
        )
    ):
        function = option(function)
    return function


def request_filter(
    states: tuple[str, ...],
    tenant: str,
    model: str,
    lanes: tuple[str, ...],
    min_priority: int | None,
    max_priority: int | None,
    min_age: float | None,
) -> RequestFilter:
    return RequestFilter(
        tuple(RequestState(state) for state in states),
        tenant,
        min_priority,
        max_priority,
        model,
        tuple(Lane(lane) for lane in lanes),
        min_age,
    )
