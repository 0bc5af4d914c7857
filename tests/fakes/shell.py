"""What stands around the scheduler's loop in its unit tests: a writer that commits, and an executor that answers, when told.

Tokens are an oracle's: a function of the prompt's first token and the index in the sequence, so that a lost, doubled or crossed
token shows.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tokenmill_scheduler.core.records import Blocks, ExecutorDescription, Plan, Result, SequenceFinish, StepTimes
from tokenmill_scheduler.core.request import Request, Sampling
from tokenmill_scheduler.drive import Drive
from tokenmill_scheduler.ledger.port import Ledger, LedgerUnavailable, Outcome, Record, Submission
from tokenmill_scheduler.pacing import Pacer
from tokenmill_scheduler.wire import ExecutorFacts

MODEL = "played"
BLOCK_SIZE = 4


def played_token(prompt_start: int, index: int) -> int:
    """The token at `index` of the sequence (the prompt counts)."""
    return (prompt_start * 7919 + index * 31) % 1_000 + 1_000


def output_of(request: Request) -> tuple[int, ...]:
    """All output tokens of a request that nothing stops early."""
    start = len(request.prompt)
    return tuple(played_token(request.prompt[0], start + index) for index in range(request.sampling.max_tokens))


def request(request_id: str, first_token: int = 1, max_tokens: int = 4, detached: bool = True, **changes: object) -> Request:
    sampling = Sampling(max_tokens=max_tokens, seed=0)
    return Request(request_id, MODEL, (first_token, 2, 3), sampling, arrival_s=0.0, detached=detached, **changes)  # type: ignore[arg-type]


class HeldWriter:
    """A `RecordWriter` that writes to its ledger when told to commit; with `hold` False, at once."""

    def __init__(self, ledger: Ledger, hold: bool = False) -> None:
        self.ledger = ledger
        self.hold = hold
        self.saturated = False
        self.outage: LedgerUnavailable | None = None
        self._waiting: deque[tuple[Sequence[Record], Callable[[list[Outcome]], None] | None]] = deque()

    @property
    def backlog(self) -> int:
        return sum(len(records) for records, _ in self._waiting)

    def append(self, records: Sequence[Record], on_durable: Callable[[list[Outcome]], None] | None = None) -> None:
        self._waiting.append((records, on_durable))
        if not self.hold:
            # Not before `append` returns: a commit is news from another thread.
            asyncio.get_running_loop().call_soon(self.commit)

    async def submit(self, submission: Submission) -> Outcome:
        outcome: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self.append([submission], lambda outcomes: outcome.set_result(outcomes[0]))
        return await outcome

    def commit(self) -> None:
        """All that waits, in one transaction."""
        batch, self._waiting = list(self._waiting), deque()
        outcomes = iter(self.ledger.write([record for records, _ in batch for record in records]))
        for records, on_durable in batch:
            answers = [next(outcomes) for _ in records]
            if on_durable is not None:
                on_durable(answers)


@dataclass
class PlayedSequence:
    tokens: list[int]
    num_prompt: int
    max_tokens: int
    computed: int = 0


class PlayedExecutor:
    """Keeps the plans it is sent and answers the oldest when told. Blocks never run short."""

    address = "played:1"

    def __init__(self, name: str = "played", total_blocks: int = 1_000) -> None:
        description = ExecutorDescription(name, MODEL, BLOCK_SIZE, total_blocks, 10_000, 64, 512)
        self.facts = ExecutorFacts(description, "digest", 100_000, "played", 0, "0")
        self.total_blocks = total_blocks
        self.plans: list[Plan] = []
        self.unanswered: deque[Plan] = deque()
        self._sequences: dict[int, PlayedSequence] = {}

    def drive(self, epoch: int = 1, depth: int = 2) -> Drive:
        """As it joins: nothing held."""
        self._sequences.clear()
        self.unanswered.clear()
        pacer = Pacer(depth, asyncio.get_running_loop().time())
        return Drive(self, self.facts, epoch, pacer, Blocks(self.total_blocks, 0, 0), joined_s=0.0)

    def send(self, plan: Plan) -> None:
        self.plans.append(plan)
        self.unanswered.append(plan)

    def answer(self) -> Result:
        """Carries out the oldest plan."""
        plan = self.unanswered.popleft()
        for sequence_id in plan.release:
            self._sequences.pop(sequence_id, None)
        for admission in plan.admit:
            tokens = list(admission.token_ids)
            self._sequences[admission.sequence_id] = PlayedSequence(
                tokens, admission.num_prompt_tokens, admission.sampling.max_tokens
            )
        rows = [
            self._advance(sequence_id, most)
            for sequence_id, most in zip(plan.advance_sequence_ids, plan.advance_max_tokens, strict=True)
        ]
        return Result(
            plan.epoch,
            plan.plan_id,
            plan.advance_sequence_ids,
            num_computed=tuple(computed for computed, _, _ in rows),
            num_sampled=tuple(len(sampled) for _, sampled, _ in rows),
            token_ids=tuple(token for _, sampled, _ in rows for token in sampled),
            finishes=tuple(finish for _, _, finish in rows),
            blocks=self._blocks(),
            times=StepTimes(forward_us=1_000),
        )

    def _advance(self, sequence_id: int, most: int) -> tuple[int, list[int], int]:
        sequence = self._sequences.get(sequence_id)
        if sequence is None:
            return 0, [], SequenceFinish.NONE
        computed = min(most, len(sequence.tokens) - sequence.computed)
        sequence.computed += computed
        if sequence.computed < len(sequence.tokens):
            return computed, [], SequenceFinish.NONE
        token = played_token(sequence.tokens[0], len(sequence.tokens))
        sequence.tokens.append(token)
        if len(sequence.tokens) - sequence.num_prompt < sequence.max_tokens:
            return computed, [token], SequenceFinish.NONE
        del self._sequences[sequence_id]
        return computed, [token], SequenceFinish.LENGTH

    def _blocks(self) -> Blocks:
        held = sum(-(-sequence.computed // BLOCK_SIZE) for sequence in self._sequences.values())
        return Blocks(self.total_blocks - held, 0, held)
