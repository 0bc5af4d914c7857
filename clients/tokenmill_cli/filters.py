"""Conditions on requests as command-line options."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click
from tokenmill_client import RequestFilter, RequestState

F = TypeVar("F", bound=Callable[..., Any])

_STATES = [state.value for state in RequestState]


def filter_options(function: F) -> F:
    """The conditions, as keyword arguments for `request_filter`."""
    for option in reversed(
        (
            click.option("--state", "states", type=click.Choice(_STATES), multiple=True, help="In this state; repeatable."),
            click.option("--tenant", default="", help="Of this tenant."),
            click.option("--model", default="", help="For this model."),
            click.option("--min-priority", type=int, help="Of at least this priority."),
            click.option("--max-priority", type=int, help="Of at most this priority."),
        )
    ):
        function = option(function)
    return function


def request_filter(
    states: tuple[str, ...], tenant: str, model: str, min_priority: int | None, max_priority: int | None
) -> RequestFilter:
    return RequestFilter(tuple(RequestState(state) for state in states), tenant, min_priority, max_priority, model)
