"""What is simulated: arrivals of a workload, with what a workload does not say. Must not know: the core's state, executors."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain, repeat

from tokenmill_scheduler.core.request import Lane, Request, Sampling
from tokenmill_workloads import Arrival

# What a model executor makes of every step is this token, and so is every prompt token that no hash id stands for.
TOKEN = 0


@dataclass(frozen=True, slots=True)
class SimulatedRequest:
    """An arrival that makes exactly its `output_tokens`, though its client asks for `max_tokens`, where that is given.

    `prompt` has its very tokens where they are known. Seconds count from its arrival: its deadline, how long it may wait in the
    queue, and when its client leaves, if it has not ended by then.
    """

    arrival: Arrival
    prompt: tuple[int, ...] | None = None
    priority: int = 0
    lane: Lane = Lane.STANDARD
    tenant: str = "default"
    deadline_s: float | None = None
    max_tokens: int | None = None
    queue_timeout_s: float | None = None
    leaves_s: float | None = None

    @property
    def shares_prefixes(self) -> bool:
        return self.prompt is not None or bool(self.arrival.hash_ids)

    def token_ids(self) -> tuple[int, ...]:
        """Its prompt: a hash id stands for its whole block. Made anew at each call, for those of a long trace fill the memory."""
        arrival = self.arrival
        if self.prompt is not None:
            return self.prompt
        if not arrival.hash_ids:
            return (TOKEN,) * arrival.prompt_tokens
        blocks = (repeat(_token_of(hash_id), arrival.hash_block_tokens) for hash_id in arrival.hash_ids)
        tokens = tuple(chain.from_iterable(blocks))
        return tokens[: arrival.prompt_tokens] + (TOKEN,) * (arrival.prompt_tokens - len(tokens))

    def request(self, index: int, model: str) -> Request:
        """As the core is given it: named by its place among the requests, which is its seed as well."""
        arrival = self.arrival
        return Request(
            str(index),
            model,
            self.token_ids(),
            Sampling(self.max_tokens or arrival.output_tokens, seed=index),
            arrival.at_s,
            self.priority,
            None if self.deadline_s is None else arrival.at_s + self.deadline_s,
            self.tenant,
            lane=self.lane,
            queue_deadline_s=None if self.queue_timeout_s is None else arrival.at_s + self.queue_timeout_s,
        )


def _token_of(hash_id: int) -> int:
    """Tokens have 32 bits."""
    return hash_id % 2**32


@dataclass(frozen=True, slots=True)
class Mix:
    """Drawn: lanes by their shares (real-time, standard, batch), one of so many tenants, of the priorities, of the deadlines."""

    lanes: Sequence[float] | None = None
    tenants: int = 1
    priorities: Sequence[int] = ()
    deadlines_s: Sequence[float] = ()
    max_tokens: int | None = None


def mixed(arrivals: Iterable[Arrival], mix: Mix = Mix(), seed: int = 42) -> list[SimulatedRequest]:
    """The same seed gives the same draw."""
    draw = random.Random(seed)
    return [_mixed(SimulatedRequest(arrival), mix, draw) for arrival in arrivals]


def _mixed(request: SimulatedRequest, mix: Mix, draw: random.Random) -> SimulatedRequest:
    if mix.lanes is not None:
        request = replace(request, lane=draw.choices(list(Lane), mix.lanes)[0])
    if mix.tenants > 1:
        request = replace(request, tenant=f"tenant-{draw.randrange(mix.tenants) + 1}")
    if mix.priorities:
        request = replace(request, priority=draw.choice(mix.priorities))
    if mix.deadlines_s:
        request = replace(request, deadline_s=draw.choice(mix.deadlines_s))
    if mix.max_tokens is not None:
        request = replace(request, max_tokens=max(mix.max_tokens, request.arrival.output_tokens))
    return request
