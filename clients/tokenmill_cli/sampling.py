"""The options of a request as command-line options. Names are the protocol's; the server knows the defaults and judges values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import click
from tokenmill_client import Lane
from tokenmill_client.options import GenerateOptions

F = TypeVar("F", bound=Callable[..., Any])


class _Bias(click.ParamType[tuple[int, float]]):
    name = "ID:VALUE"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, float]:
        if isinstance(value, tuple):
            return value
        token_id, _, bias = str(value).partition(":")
        try:
            return int(token_id), float(bias)
        except ValueError:
            self.fail(f"{value!r} is not TOKEN_ID:VALUE, such as 42:-100", param, ctx)


_OPTIONS: tuple[Callable[[F], F], ...] = (
    click.option("-m", "--max-tokens", type=int, help="Most output tokens.  [default: what fits]"),
    click.option("--min-tokens", type=int, help="No end before this many tokens."),
    click.option("-t", "--temperature", type=float, help="0 is greedy.  [default: 1]"),
    click.option("--top-p", type=float, help="Only the likeliest tokens that sum up to this."),
    click.option("--top-k", type=int, help="Only the likeliest so many tokens."),
    click.option("--min-p", type=float, help="Only tokens at least this likely, as a share of the likeliest."),
    click.option("--repetition-penalty", type=float, help="Above 1: fewer repetitions of prompt and output."),
    click.option("--presence-penalty", type=float, help="Above 0: fewer tokens that are in the output."),
    click.option("--frequency-penalty", type=float, help="Above 0: the fewer, the more often they are."),
    click.option("--logit-bias", type=_Bias(), multiple=True, help="Add VALUE to a token's logit; repeatable."),
    click.option("--seed", type=int, help="The same seed and request give the same tokens."),
    click.option("--stop", multiple=True, metavar="TEXT", help="End where this text starts; repeatable."),
    click.option("--stop-token-id", "stop_token_ids", type=int, multiple=True, help="End with this token; repeatable."),
    click.option("--include-stop-str-in-output", is_flag=True, default=None, help="Show the stop text."),
    click.option("--ignore-eos", is_flag=True, default=None, help="Go on past the end-of-sequence token."),
    click.option("-n", "--n", type=int, help="Choices to make of the prompt, each with its own seed.  [default: 1]"),
    click.option("--best-of", type=int, help="Make so many, and give the best of them: those of the highest mean log probability."),
    click.option("--logprobs", type=int, help="Log probabilities of this many likeliest tokens (with --json)."),
    click.option("--model", help="The model.  [default: the only one served]"),
    click.option("--priority", type=int, help="Higher runs sooner, with policy priority.  [default: 0]"),
    click.option("--lane", type=click.Choice([lane.value for lane in Lane]), help="Quality of service.  [default: standard]"),
    click.option("--timeout", type=float, metavar="SECONDS", help="End the request so long after it was accepted."),
    click.option("--queue-timeout", type=float, metavar="SECONDS", help="End it if it has not run by then."),
    click.option("--tenant", help="Whose request it is."),
    click.option("--request-id", help="An id of your own: sending it again joins the first."),
    click.option("--cache-salt", help="Share cached prefixes only with requests of this salt."),
)


def request_options(function: F) -> F:
    """All options of a request, as keyword arguments for `chosen`."""
    for option in reversed(_OPTIONS):
        function = option(function)
    return function


def chosen(options: dict[str, Any]) -> GenerateOptions:
    """Those that were given."""
    given = {name: value for name, value in options.items() if value is not None and value != ()}
    if "logit_bias" in given:
        given["logit_bias"] = dict(given["logit_bias"])
    if "lane" in given:
        given["lane"] = Lane(given["lane"])
    return cast(GenerateOptions, given)
