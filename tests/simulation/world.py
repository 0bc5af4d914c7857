"""A scheduler core with model executors around it, and a client's and a ledger's view of what comes out, checked at every event.

Every effect is checked as it comes: a transition starts from the state recorded last, tokens continue without gap and are the
oracle's, nothing follows a terminal state. Results and events can be handed in in any order that a network allows.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace

from tokenmill_scheduler.core import invariants, quarantine
from tokenmill_scheduler.core.records import (
    Cancelled,
    Effect,
    Event,
    ExecutorDescription,
    ExecutorDrained,
    ExecutorJoined,
    ExecutorLost,
    ExecutorUndrained,
    Plan,
    PlanDue,
    PlanIssued,
    QueuePaused,
    QueueResumed,
    Result,
    ResultArrived,
    Submitted,
    TextStop,
    Tick,
    TokensGenerated,
    Transitioned,
    Updated,
)
from tokenmill_scheduler.core.request import QUEUED, TERMINAL, TRANSITIONS, Lane, Request, Sampling, State
from tokenmill_scheduler.core.scheduler import Scheduler, SchedulerConfig

from tests.simulation import oracle
from tests.simulation.model_executor import Died, ModelExecutor

MODEL = "tiny"


def description(
    name: str = "x",
    *,
    model: str = MODEL,
    block_size: int = 4,
    num_blocks: int = 64,
    max_model_len: int = 256,
    max_num_seqs: int = 64,
    max_num_batched_tokens: int = 512,
    pipeline_depth: int = 2,
    caching: bool = False,
) -> ExecutorDescription:
    return ExecutorDescription(
        name,
        model,
        block_size,
        num_blocks,
        max_model_len,
        max_num_seqs,
        max_num_batched_tokens,
        pipeline_depth,
        caches_prefixes=caching,
        cache_version="tiny 1" if caching else None,
    )


@dataclass
class Record:
    """What the ledger has of one request."""

    request: Request
    state: State = State.WAITING
    output: list[int] = field(default_factory=list)
    transitions: list[Transitioned] = field(default_factory=list)
    number: int = 0
    overtaken: int = 0

    @property
    def ended(self) -> Transitioned | None:
        return self.transitions[-1] if self.state in TERMINAL else None

    @property
    def rank(self) -> tuple[int, int]:
        """Less runs sooner under policy `priority`."""
        return self.request.lane, -self.request.priority

    @property
    def path(self) -> str:
        return " ".join([State.WAITING, *(t.after for t in self.transitions)])


class World:
    """Seeds name requests: request "r7" has seed 7. `overlap` is the executors' way to prepare the next plan early."""

    def __init__(self, config: SchedulerConfig | None = None, *executors: ExecutorDescription, overlap: bool = False) -> None:
        self.config = config or SchedulerConfig()
        self.core = Scheduler(self.config)
        self.now_s = 1000.0
        self.records: dict[str, Record] = {}
        self.executors: dict[str, ModelExecutor] = {}
        self.arriving: dict[str, deque[Result]] = {}
        self.last_results: dict[str, Result] = {}
        self.plans: list[Plan] = []
        self.effects: list[Effect] = []
        self.paused = False
        self.drained: list[str] = []
        # How often a request has killed an executor.
        self.kills: dict[str, int] = {}
        for executor in executors:
            self.executors[executor.name] = ModelExecutor(executor, overlap)
            self.arriving[executor.name] = deque()
            self._join(executor.name)

    # ---- events ----

    def handle(self, event: Event) -> list[Effect]:
        effects = self.core.handle(event, self.now_s)
        self.effects += effects
        for effect in effects:
            self._record(effect)
        if len(self.executors) == 1:
            self._check_fairness(effects)
        invariants.check(self.core)
        return effects

    def submit(
        self,
        seed: int,
        prompt: int = 4,
        max_tokens: int = 8,
        *,
        priority: int = 0,
        deadline_s: float | None = None,
        model: str = MODEL,
        sampling: Sampling | None = None,
        lane: Lane = Lane.STANDARD,
        queue_deadline_s: float | None = None,
    ) -> str:
        request = Request(
            f"r{seed}",
            model,
            self._prompt(seed, prompt),
            sampling or Sampling(max_tokens=max_tokens, seed=seed),
            self.now_s,
            priority,
            deadline_s,
            lane=lane,
            queue_deadline_s=queue_deadline_s,
        )
        self.records[request.request_id] = Record(request, number=len(self.records))
        self.handle(Submitted(request))
        return request.request_id

    @staticmethod
    def _prompt(seed: int, length: int) -> tuple[int, ...]:
        """Of three kinds, equal from the first token on, but for an odd last token now and then."""
        tokens = range(100 * (1 + seed % 3), 100 * (1 + seed % 3) + length)
        return (*tokens[:-1], tokens[-1] + seed % 2)

    def cancel(self, request_id: str) -> list[Effect]:
        return self.handle(Cancelled(request_id, "by the client"))

    def update(self, request_id: str, priority: int | None = None, deadline_s: float | None = None) -> list[Effect]:
        return self.handle(Updated(request_id, priority, deadline_s))

    def tick(self, seconds: float = 0.0) -> list[Effect]:
        self.now_s += seconds
        return self.handle(Tick())

    def pause(self) -> None:
        self.paused = True
        self.handle(QueuePaused("by ann: a test"))

    def resume(self) -> None:
        self.paused = False
        self.handle(QueueResumed())

    def drain_executor(self, executor: str = "x") -> list[Effect]:
        self.drained.append(executor)
        return self.handle(ExecutorDrained(executor, "by ann: a test"))

    def undrain_executor(self, executor: str = "x") -> None:
        self.drained = [name for name in self.drained if name != executor]
        self.handle(ExecutorUndrained(executor))

    def plan(self, executor: str = "x", *, send: bool = True) -> Plan | None:
        """Asks for a plan and queues it at the executor; not `send`: it is lost on the way."""
        issued = [effect for effect in self.handle(PlanDue(executor)) if isinstance(effect, PlanIssued)]
        assert len(issued) <= 1
        if not issued:
            return None
        plan = issued[0].plan
        self.plans.append(plan)
        if send:
            self.executors[executor].send(plan)
        return plan

    def step(self, executor: str = "x") -> Result:
        """As `try_step`, where the executor lives."""
        result = self.try_step(executor)
        assert result is not None, f"{executor} died of its plan"
        return result

    def try_step(self, executor: str = "x") -> Result | None:
        """The executor carries out its oldest plan; the result is on its way. None: it died of it, and is back without memory."""
        try:
            result = self.executors[executor].step()
        except Died as death:
            self._count_kill(death)
            self.lose(executor)
            self.rejoin(executor)
            return None
        self.arriving[executor].append(result)
        return result

    def _count_kill(self, death: Died) -> None:
        request_id = f"r{death.args[0]}"
        self.kills[request_id] = self.kills.get(request_id, 0) + 1

    def deliver(self, executor: str = "x", text_stops: dict[int, TextStop] | None = None) -> list[Effect]:
        """Hands in the oldest result on its way."""
        result = self.last_results[executor] = self.arriving[executor].popleft()
        return self.handle(ResultArrived(executor, result, text_stops or {}))

    def turn(self, executor: str = "x") -> Plan | None:
        """One unpipelined step: plan, carry out, hand in."""
        plan = self.plan(executor)
        if plan is not None and self.try_step(executor) is not None:
            self.deliver(executor)
        return plan

    def lose(self, executor: str = "x", reason: str = "gone", *, lives: bool = False) -> None:
        """The executor dies, or another scheduler takes it, with its plans and results on the way."""
        epoch = self.executors[executor].epoch
        self.arriving[executor].clear()
        self.handle(ExecutorLost(executor, epoch, reason, lives))

    def rejoin(self, executor: str = "x", *, same_process: bool = False) -> None:
        epoch = self.executors[executor].epoch
        self.executors[executor].restart(epoch + 1)
        self._join(executor, epoch_seen=epoch if same_process else 0)

    def restart_scheduler(self) -> None:
        """Kill the scheduler and take all unfinished requests up again from the record."""
        self.core = Scheduler(self.config)
        self.kills.clear()
        if self.paused:
            self.handle(QueuePaused("by ann: a test"))
        for name in self.drained:
            self.handle(ExecutorDrained(name, "by ann: a test"))
        for record in [r for r in self.records.values() if r.state not in TERMINAL]:
            record.overtaken = 0
            self.handle(Submitted(record.request, tuple(record.output), record.state))
        self.last_results.clear()
        for name in self.executors:
            self.arriving[name].clear()
            self.rejoin(name)

    def drain(self, most_steps: int = 10_000) -> None:
        """Goes on without faults, with full pipelines, until nothing is left to do."""
        for _ in range(most_steps):
            if not self._advance_all():
                break
        else:
            raise AssertionError(f"not done after {most_steps} steps: {self.unfinished}")

    def _advance_all(self) -> bool:
        busy = False
        for name, executor in self.executors.items():
            if not self._joined(name):
                continue
            while self.plan(name):
                busy = True
            if not executor.idle:
                self.try_step(name)
                busy = True
            if self.arriving[name]:
                self.deliver(name)
                busy = True
        due_s = self.core.next_wakeup_s()
        if not busy and due_s is not None:
            self.now_s = max(self.now_s, due_s)
            self.tick()
            busy = True
        return busy

    # ---- what came of it ----

    @property
    def unfinished(self) -> list[str]:
        return [request_id for request_id, record in self.records.items() if record.state not in TERMINAL]

    def output(self, request_id: str) -> list[int]:
        return self.records[request_id].output

    def state(self, request_id: str) -> State:
        return self.records[request_id].state

    def expected(self, request_id: str, executor: str = "x") -> list[int]:
        """The oracle's whole output."""
        request = self.records[request_id].request
        most = self.executors[executor].description.max_model_len
        return oracle.whole_output(request.sampling.seed, len(request.prompt), request.sampling.max_tokens, most)

    def check_idle(self) -> None:
        """All ended; all blocks free or cached; no gauge above zero; no block was ever missing; the mirrors are true."""
        assert self.unfinished == []
        for name, executor in self.executors.items():
            assert executor.blocks.available == executor.description.num_blocks, f"{name} still holds blocks"
            assert self.core._roster.executors[name].mirror._stored == set(executor.pool.all_stored())
            assert executor.ran_out == 0, f"a plan for {name} needed a block that was not there"
        assert (self.core.num_running, self.core.num_waiting, self.core.kv_cache_usage) == (0, 0, 0.0)

    def suspects(self) -> list[str]:
        """The requests that may have killed an executor."""
        return [request_id for request_id, live in self.core._roster.requests.items() if live.suspect_until or live.lost_with]

    def on_trial(self, executor: str) -> bool:
        """Whether it runs a request that may have killed an executor."""
        return quarantine.on_trial(self.core._roster.executors[executor])

    def _joined(self, name: str) -> bool:
        return any(view.name == name and view.joined for view in self.core.executors())

    def _join(self, name: str, epoch_seen: int = 0) -> None:
        executor = self.executors[name]
        stored = executor.pool.all_stored()
        self.handle(ExecutorJoined(executor.description, executor.epoch, executor.blocks, stored, epoch_seen))

    def _record(self, effect: Effect) -> None:
        match effect:
            case Transitioned():
                self._record_transition(effect)
            case TokensGenerated():
                self._record_tokens(effect)
            case Updated():
                self._record_update(effect)

    def _record_update(self, effect: Updated) -> None:
        record = self.records[effect.request_id]
        assert record.state not in TERMINAL
        if effect.priority is not None:
            record.request = replace(record.request, priority=effect.priority)
        if effect.deadline_s is not None:
            record.request = replace(record.request, deadline_s=effect.deadline_s)

    def _check_fairness(self, effects: list[Effect]) -> None:
        """Who is admitted for the first time passes no preempted equal, and no waiting one more often than allowed."""
        admitted = [
            self.records[effect.request_id]
            for effect in effects
            if isinstance(effect, Transitioned) and (effect.before, effect.after) == (State.WAITING, State.PREFILL)
        ]
        assert not (admitted and (self.paused or list(self.executors) == self.drained)), "admitted though nobody may be"
        by_priority = self.config.policy == "priority"
        for new in admitted:
            for old in self.records.values():
                if old.state not in QUEUED or (by_priority and old.rank > new.rank):
                    continue
                assert old.state is not State.PREEMPTED, f"{new.request.request_id} ran before a preempted one"
                if by_priority and old.rank < new.rank:
                    raise AssertionError(f"{new.request.request_id} ran before one of higher priority")
                old.overtaken += old.number < new.number
                by_hit = self.config.policy == "lpm"
                most = max(self.config.max_overtakes, by_hit * self.config.max_hit_overtakes)
                assert by_priority or old.overtaken <= most, f"{old.request.request_id} starves"

    def _record_transition(self, effect: Transitioned) -> None:
        record = self.records[effect.request_id]
        assert effect.before == record.state, f"{effect.request_id} is {record.state}, not {effect.before}"
        assert effect.after in TRANSITIONS[effect.before]
        assert (effect.finish_reason is not None) == (effect.after in TERMINAL)
        record.state = effect.after
        record.transitions.append(effect)

    def _record_tokens(self, effect: TokensGenerated) -> None:
        assert len(set(effect.request_ids)) == len(effect.request_ids)
        assert sum(effect.counts) == len(effect.token_ids)
        start = 0
        for request_id, first, count in zip(effect.request_ids, effect.first_indexes, effect.counts, strict=True):
            record = self.records[request_id]
            assert record.state not in TERMINAL, f"a token for {request_id} after its end"
            assert first == len(record.output), f"{request_id}: index {first} after {len(record.output)} tokens"
            tokens = list(effect.token_ids[start : start + count])
            seed = record.request.sampling.seed
            assert tokens == [oracle.token(seed, first + i) for i in range(count)], f"{request_id} got another's token"
            record.output += tokens
            start += count
