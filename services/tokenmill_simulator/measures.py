"""Watches a simulation: columns of requests, of steps, and of gaps between tokens.

Everything about requests comes from the core's effects, which is what clients are told. Must not know: the core's state, what
figures are made of it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from tokenmill_scheduler.core.effects import Effect, TokensGenerated, Transitioned
from tokenmill_scheduler.core.request import TERMINAL, State

from tokenmill_simulator.requests import SimulatedRequest
from tokenmill_simulator.simulation import Step

Floats = NDArray[np.float64]


class Measures:
    """Columns of requests by their place among all (NaN: has not happened), of steps, and all gaps between tokens."""

    def __init__(
        self, requests: Sequence[SimulatedRequest], request_ids: Sequence[str] | None = None, client_s: float = 0.0
    ) -> None:
        """`request_ids` are those that effects name them by; without any, their places are their names.

        `client_s`: what lies between a client and the core, both ways together. Being the same for all requests it changes nothing
        but when clients see their tokens.
        """
        count = len(requests)
        self._places = {request_id: place for place, request_id in enumerate(request_ids or map(str, range(count)))}
        self.requests = requests
        self._client_s = client_s
        self.arrival_s: Floats = np.array([request.arrival.at_s for request in requests])
        self.started_s: Floats = np.full(count, np.nan)
        self.first_token_s: Floats = np.full(count, np.nan)
        self.last_token_s: Floats = np.full(count, np.nan)
        self.ended_s: Floats = np.full(count, np.nan)
        self.tokens = np.zeros(count, dtype=np.int64)
        self.done = np.zeros(count, dtype=np.bool_)
        # Refused at submit and not let in later; `refusals` counts each time that any was.
        self.refused = np.zeros(count, dtype=np.bool_)
        self.refusals = 0
        self.steps: list[Step] = []
        self._gaps: list[Floats] = []

    def happened(self, effects: list[Effect], now_s: float) -> None:
        for effect in effects:
            if isinstance(effect, TokensGenerated):
                self._tokens(effect, now_s + self._client_s)
            elif isinstance(effect, Transitioned):
                self._moved(effect, now_s)

    def stepped(self, step: Step) -> None:
        self.steps.append(step)

    def was_refused(self, place: int, for_good: bool) -> None:
        self.refused[place] = for_good
        self.refusals += 1

    def _tokens(self, effect: TokensGenerated, now_s: float) -> None:
        rows = np.array(list(map(self._places.__getitem__, effect.request_ids)))
        counts = np.array(effect.counts)
        gaps = now_s - self.last_token_s[rows]
        self.tokens[rows] += counts
        self.last_token_s[rows] = now_s
        first = np.isnan(gaps)
        if first.any():
            self.first_token_s[rows[first]] = now_s
            gaps, counts = gaps[~first], counts[~first]
        # Of several that came at once each counts, as if they had come one after the other.
        self._gaps.append(gaps if counts.max(initial=1) == 1 else np.repeat(gaps / counts, counts))

    def _moved(self, effect: Transitioned, now_s: float) -> None:
        row = self._places[effect.request_id]
        if effect.after is State.PREFILL and np.isnan(self.started_s[row]):
            self.started_s[row] = now_s
        elif effect.after in TERMINAL:
            self.ended_s[row] = now_s + self._client_s
            self.done[row] = effect.after is State.DONE

    # ---- what came of it -------------------------------------------------------------------------------------------------------

    @property
    def time_to_first_token_s(self) -> Floats:
        """Of those that had a token."""
        times = self.first_token_s - self.arrival_s
        return times[~np.isnan(times)]

    @property
    def inter_token_s(self) -> Floats:
        return np.concatenate(self._gaps) if self._gaps else np.zeros(0)

    @property
    def latency_s(self) -> Floats:
        """Of those that were done."""
        return (self.ended_s - self.arrival_s)[self.done]

    @property
    def queue_time_s(self) -> Floats:
        """Until they first ran."""
        times = self.started_s - self.arrival_s
        return times[~np.isnan(times)]

    def met(self, ttft_s: float, itl_s: float) -> NDArray[np.bool_]:
        """Requests that are done, had their first token in time, then one every `itl_s` on average (DistServe, OSDI 2024)."""
        mean_s = (self.last_token_s - self.first_token_s) / np.maximum(1, self.tokens - 1)
        in_time = (self.first_token_s - self.arrival_s <= ttft_s) & (mean_s <= itl_s)
        return self.done & in_time
