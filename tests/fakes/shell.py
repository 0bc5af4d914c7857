"""What stands around the scheduler's loop in its unit tests: a writer that commits, and an executor that answers, when told.

Tokens are an oracle's: a function of the prompt's first token and the index in the sequence, so that a lost, doubled or crossed
token shows.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tokenmill_scheduler.core.backlog import QueueLimits
from tokenmill_scheduler.core.plans import Blocks, ExecutorDescription, Plan, Result, SequenceFinish, StepTimes
from tokenmill_scheduler.core.request import Request, Sampling, State
from tokenmill_scheduler.core.scheduler import Scheduler, SchedulerConfig
from tokenmill_scheduler.desk.port import Attachment
from tokenmill_scheduler.desk.records import Ended, Submitted
from tokenmill_scheduler.drive import Drive
from tokenmill_scheduler.handover import PATIENCE_S
from tokenmill_scheduler.idle import IdleClients
from tokenmill_scheduler.ledger.errors import LedgerUnavailable
from tokenmill_scheduler.ledger.port import Ledger
from tokenmill_scheduler.ledger.records import Lease, Outcome, Record, Submission
from tokenmill_scheduler.loop import Loop
from tokenmill_scheduler.loop_desk import LoopDesk
from tokenmill_scheduler.models import Models
from tokenmill_scheduler.pacing import ONE_STEP, Pacer, Repeats
from tokenmill_scheduler.text.model import TextModel
from tokenmill_scheduler.wire import ExecutorFacts

from tests.fakes.memory_ledger import MemoryLedger

OnDurable = Callable[[list[Outcome]], None]

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
        self.lease: Lease | None = None
        self.saturated = False
        # How many of the next commits the database refuses.
        self.refusals = 0
        self.outage: LedgerUnavailable | None = None
        self._waiting: deque[tuple[Sequence[Record], OnDurable | None]] = deque()

    @property
    def backlog(self) -> int:
        return sum(len(records) for records, _ in self._waiting)

    def append(self, records: Sequence[Record], on_durable: OnDurable | None = None) -> None:
        self._waiting.append((records, on_durable))
        if not self.hold:
            # Not before `append` returns: a commit is news from another thread.
            asyncio.get_running_loop().call_soon(self.commit)

    async def submit(self, submission: Submission, *beside: Record) -> Outcome:
        outcome: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self.append([submission, *beside], lambda outcomes: outcome.set_result(outcomes[0]))
        return await outcome

    def commit(self) -> None:
        """All that waits, in one transaction; while the database refuses, it waits on."""
        for on_durable, outcomes in self.save():
            if on_durable is not None:
                on_durable(outcomes)

    def save(self) -> list[tuple[OnDurable | None, list[Outcome]]]:
        """As `commit`, but nobody is told: returns who would have been, and of what."""
        self.outage = LedgerUnavailable("the database takes no writes") if self.refusals else None
        if self.refusals:
            self.refusals -= 1
            return []
        batch, self._waiting = list(self._waiting), deque()
        outcomes = iter(self.ledger.write([record for records, _ in batch for record in records], self.lease))
        return [(on_durable, [next(outcomes) for _ in records]) for records, on_durable in batch]


@dataclass
class PlayedSequence:
    tokens: list[int]
    num_prompt: int
    max_tokens: int
    computed: int = 0


class PlayedExecutor:
    """Keeps the plans it is sent and answers the oldest when told, after as few of its steps as it may. Blocks never run short."""

    address = "played:1"

    def __init__(self, name: str = "played", total_blocks: int = 1_000) -> None:
        description = ExecutorDescription(name, MODEL, BLOCK_SIZE, total_blocks, 10_000, 64, 512)
        self.facts = ExecutorFacts(description, "digest", 100_000, "played", 0, "0")
        self.total_blocks = total_blocks
        self.plans: list[Plan] = []
        self.unanswered: deque[Plan] = deque()
        self._sequences: dict[int, PlayedSequence] = {}

    def drive(self, epoch: int = 1, depth: int = 2, repeats: Repeats = ONE_STEP) -> Drive:
        """As it joins: nothing held."""
        self._sequences.clear()
        self.unanswered.clear()
        pacer = Pacer(depth, asyncio.get_running_loop().time(), repeats)
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
        steps = plan.max_steps if self.unanswered and self.unanswered[0].after_all_steps else 1
        rows = [
            self._take_steps(sequence_id, most, steps)
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
            times=StepTimes(forward_us=1_000 * steps),
            num_steps=steps,
        )

    def _take_steps(self, sequence_id: int, most: int, steps: int) -> tuple[int, list[int], int]:
        computed, sampled, finish = self._advance(sequence_id, most)
        for _ in range(steps - 1):
            if finish or not sampled:
                break
            _, further, finish = self._advance(sequence_id, 1)
            computed, sampled = computed + 1, sampled + further
        return computed, sampled, finish

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


GRACE_S = 30.0


class SetClock:
    """Stands still until it is set."""

    def __init__(self) -> None:
        self.now_s = 1_000.0

    def __call__(self) -> float:
        return self.now_s


@dataclass
class Shell:
    """A scheduler without network, with one executor. Another one over the same ledger is what a restart leaves."""

    ledger: MemoryLedger
    writer: HeldWriter
    clock: SetClock
    loop: Loop
    desk: LoopDesk
    executor: PlayedExecutor

    @classmethod
    def over(
        cls,
        ledger: MemoryLedger,
        max_queue_len: int = 100,
        config: SchedulerConfig | None = None,
        idle_client_timeout_s: float = 0.0,
        patience_s: float = PATIENCE_S,
    ) -> Shell:
        clock, writer = SetClock(), HeldWriter(ledger)
        loop = Loop(Scheduler(config or SchedulerConfig()), writer, _no_text, GRACE_S, clock, IdleClients(idle_client_timeout_s))
        desk = LoopDesk(QueueLimits(max_queue_len), loop, Models(), ledger, writer, patience_s=patience_s)
        return cls(ledger, writer, clock, loop, desk, PlayedExecutor())

    async def join(self, epoch: int = 1) -> None:
        self.loop.joined(self.executor.drive(epoch))
        await settle()

    async def submit(self, submitted: Request, digest: bytes = b"d") -> Submitted:
        answer = await self.desk.submit(submitted, digest)
        await settle()
        return answer

    async def step(self) -> None:
        """The oldest plan is answered; what follows, follows."""
        self.loop.answered(self.loop.drives["played"], self.executor.answer())
        await settle()

    async def states_after_tick(self, names: str) -> list[State]:
        ticking = asyncio.create_task(self.loop.tick())
        await settle()
        ticking.cancel()
        return [(await self.desk.status(name)).stored.state for name in names]

    async def run_out(self) -> None:
        """Steps until no plan is out."""
        while self.executor.unanswered:
            await self.step()


def _no_text(model: str) -> TextModel:
    raise AssertionError("no request here has stop strings")


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def read_all(attachment: Attachment) -> tuple[tuple[int, ...], Ended]:
    """Tokens from the attachment's index on, and the end; checks that each index comes once, in order."""
    tokens = list(attachment.earlier)
    async for item in attachment.chunks:
        if isinstance(item, Ended):
            await attachment.chunks.aclose()
            return tuple(tokens), item
        assert item.first_index == len(tokens)
        tokens += item.token_ids
    raise AssertionError("the stream ended without an Ended")
