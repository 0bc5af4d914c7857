"""A request that has not ended, with its output so far and its place in the scheduler: the mutable side of `Request`.

Must not know: queues, plans, blocks.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from tokenmill_scheduler.core.effects import Transitioned
from tokenmill_scheduler.core.mirror import BlockHashes
from tokenmill_scheduler.core.request import FinishReason, Request, State, check_transition
from tokenmill_scheduler.core.sequence import Sequence

# Error codes as google.rpc.Code has them.
RESOURCE_EXHAUSTED = 8
INTERNAL = 13


@dataclass(frozen=True, slots=True)
class Ending:
    """How a request ends: its terminal state and what the client is told."""

    state: State
    finish_reason: FinishReason
    reason: str = ""
    error: str = ""
    error_code: int = 0


@dataclass(slots=True, eq=False)
class LiveRequest:
    """`ordinal` counts submissions and settles every tie. `overtaken` counts admissions of later ones since it last queued.

    `computed_before` is how many of its tokens sequences that were preempted had computed, at the most.

    `sequence` is the one whose results still bring tokens: of a running request its current sequence, of a preempted one the
    released sequence until the results of all plans that advanced it are in, else None.
    `hashes` are those of its blocks, by cache version and block size (see `mirror.py`).
    `suspect_until` is above 0 while it is suspected of having killed an executor: it is cleared once it has computed so many tokens
    (see `quarantine.py`). `lost_with` names the executors lost with it while it was under suspicion, each with its epoch.
    `gang` has, while they wait, the choices of one request that are to be admitted together, itself among them: the first of them
    stands in the queue for all. `cached_tokens` is to be told with its next move.
    `no_blocks` counts the answers NO_BLOCKS for it in a row while it knew `no_blocks_known` tokens.
    `aged`: it was admitted for its age. `paid` tokens, prompt and output, were charged to its tenant's account (see `ordering.py`).
    """

    request: Request
    ordinal: int
    state: State
    output: list[int] = field(default_factory=list)
    sequence: Sequence | None = None
    overtaken: int = 0
    computed_before: int = 0
    suspect_until: int = 0
    lost_with: list[tuple[str, int]] = field(default_factory=list)
    hashes: dict[tuple[str, int], BlockHashes] = field(default_factory=dict)
    gang: list[LiveRequest] | None = None
    cached_tokens: int | None = None
    no_blocks: int = 0
    no_blocks_known: int = 0
    aged: bool = False
    paid: int = 0

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def entry(self) -> LiveRequest:
        """The one that stands in the queue for it, while it waits."""
        return self.gang[0] if self.gang else self

    @property
    def gang_size(self) -> int:
        """How many sequences are admitted when it is."""
        return len(self.gang) if self.gang else 1

    @property
    def known(self) -> int:
        """Tokens to compute before the next can be sampled: the prompt and all output."""
        return len(self.request.prompt) + len(self.output)

    @property
    def at_max_tokens(self) -> bool:
        return len(self.output) >= self.request.sampling.max_tokens

    def limit(self, max_model_len: int) -> int:
        """Tokens, prompt and output, at which it ends whatever it samples."""
        return min(len(self.request.prompt) + self.request.sampling.max_tokens, max_model_len)

    @property
    def expires_s(self) -> float | None:
        """When it ends as EXPIRED; the queue's time limit is for those that have not run."""
        request = self.request
        if request.queue_deadline_s is None or self.state is not State.WAITING:
            return request.deadline_s
        return request.queue_deadline_s if request.deadline_s is None else min(request.deadline_s, request.queue_deadline_s)

    def count_no_blocks(self) -> int:
        """One more answer NO_BLOCKS for it; how many there were without a token between."""
        self.no_blocks = self.no_blocks + 1 if self.no_blocks_known == self.known else 1
        self.no_blocks_known = self.known
        return self.no_blocks

    def update(self, priority: int | None, deadline_s: float | None) -> None:
        """None leaves a value as it is."""
        if priority is not None:
            self.request = replace(self.request, priority=priority)
        if deadline_s is not None:
            self.request = replace(self.request, deadline_s=deadline_s)

    def move(self, after: State, now_s: float, reason: str = "", executor: str = "") -> Transitioned:
        """Raises IllegalTransition, and changes nothing, when the table does not have this move."""
        check_transition(self.state, after)
        before, self.state = self.state, after
        return Transitioned(self.request_id, before, after, now_s, reason, executor, cached_tokens=self._take_cached())

    def end(self, ending: Ending, now_s: float, executor: str = "") -> Transitioned:
        """As `move`, to a terminal state."""
        check_transition(self.state, ending.state)
        before, self.state = self.state, ending.state
        return Transitioned(
            self.request_id,
            before,
            ending.state,
            now_s,
            ending.reason,
            executor,
            ending.finish_reason,
            ending.error,
            ending.error_code,
            self._take_cached(),
        )

    def _take_cached(self) -> int | None:
        cached, self.cached_tokens = self.cached_tokens, None
        return cached
