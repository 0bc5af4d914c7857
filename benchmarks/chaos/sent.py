"""What clients know of one request: what they asked for and every token they were given. The oracle foretells each token.

Must not know: the client library, processes, the database.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tokenmill_executor.simulated import prompt_digest, simulated_token

# How a request stands whose client was told what no client should be told.
GIVEN_UP = "given up"


@dataclass(frozen=True, slots=True)
class Ask:
    """`deadline_s` None: it has all the time it needs."""

    request_id: str
    prompt: tuple[int, ...]
    max_tokens: int
    seed: int
    detached: bool
    deadline_s: float | None = None

    def foretold(self, count: int) -> tuple[int, ...]:
        digest = prompt_digest(self.prompt)
        return tuple(simulated_token(digest, self.seed, len(self.prompt) + index) for index in range(count))


@dataclass(slots=True)
class Sent:
    """`cancelled`: a client has asked for its end. `came_s` has a time for each message with tokens. `ended` is the state told."""

    ask: Ask
    sent_s: float
    accepted: bool = False
    cancelled: bool = False
    abandoned: bool = False
    tokens: list[int] = field(default_factory=list)
    came_s: list[float] = field(default_factory=list)
    ended: str = ""
    ended_s: float | None = None
    # What must never happen, by kind.
    duplicated: int = 0
    missing: int = 0
    wrong: int = 0
    errors: list[str] = field(default_factory=list)
    _foretold: tuple[int, ...] = ()

    def took(self, first_index: int, token_ids: Sequence[int], text: str, now_s: float) -> None:
        """A message with tokens from `first_index` on, which ought to be the next."""
        if not self._foretold:
            self._foretold = self.ask.foretold(self.ask.max_tokens)
        self.accepted = True
        self.came_s.append(now_s)
        self.duplicated += max(0, len(self.tokens) - first_index)
        self.missing += max(0, first_index - len(self.tokens))
        rightful = self._foretold[first_index : first_index + len(token_ids)]
        self.wrong += tuple(token_ids) != rightful or text != "".join(map(chr, token_ids))
        self.tokens[first_index:] = token_ids

    def end(self, state: str, now_s: float) -> None:
        self.accepted = True
        self.ended, self.ended_s = state, now_s

    def give_up(self, now_s: float) -> None:
        self.ended, self.ended_s = GIVEN_UP, now_s


@dataclass
class Book:
    """All requests of a run."""

    clock: Callable[[], float]
    requests: list[Sent] = field(default_factory=list)

    def send(self, ask: Ask) -> Sent:
        sent = Sent(ask, self.clock())
        self.requests.append(sent)
        return sent

    @property
    def num_tokens(self) -> int:
        return sum(len(sent.tokens) for sent in self.requests)

    @property
    def violations(self) -> int:
        """So far, as clients can tell."""
        return sum(sent.duplicated + sent.missing + sent.wrong + len(sent.errors) for sent in self.requests)
