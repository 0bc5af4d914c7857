"""A scheduler core with model executors around it, and a client's and a ledger's view of what comes out, checked at every event.

Every effect is checked as it comes: a transition starts from the state recorded last, tokens continue without gap and are the
oracle's, nothing follows a terminal state. Results and events can be handed in in any order that a network allows.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace

from tokenmill_scheduler.core import invariants, quarantine
from tokenmill_scheduler.core.choices import choice_ids, further_choices
from tokenmill_scheduler.core.effects import Effect, PlanIssued, TokensGenerated, Transitioned
from tokenmill_scheduler.core.events import (
    Cancelled,
    Event,
    ExecutorDrained,
    ExecutorJoined,
    ExecutorLost,
    ExecutorUndrained,
    PlanDue,
    PolicyChanged,
    QueuePaused,
    QueueResumed,
    QuotasChanged,
    ResultArrived,
    Submitted,
    TextStop,
    Tick,
    Updated,
)
from tokenmill_scheduler.core.plans import FULL_ATTENTION, BlockGroup, ExecutorDescription, Plan, Result
from tokenmill_scheduler.core.quotas import Quota
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
    groups: tuple[BlockGroup, ...] = FULL_ATTENTION,
    multi_step: bool = False,
) -> ExecutorDescription:
    """One with windows caches no prefixes."""
    caching = caching and groups == FULL_ATTENTION
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
        block_groups=groups,
        multi_step=multi_step,
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
    def path(self) -> str:
        return " ".join([State.WAITING, *(t.after for t in self.transitions)])


class World:
    """Seeds name requests: request "r7" has seed 7. `overlap` is the executors' way to prepare the next plan early.

    Plans that only decode may be of up to `max_steps`.
    """

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
        self.max_steps = 1
        self.drained: list[str] = []
        self.quotas: dict[str, Quota] = {}
        # How often a request has killed an executor.
        self.kills: dict[str, int] = {}
        for executor in executors:
            self.executors[executor.name] = ModelExecutor(executor, overlap, min(self.config.max_num_seqs, executor.max_num_seqs))
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
        self._check_groups(effects)
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
        n: int = 1,
        tenant: str = "default",
    ) -> str:
        request = Request(
            f"r{seed}",
            model,
            self._prompt(seed, prompt),
            sampling or Sampling(max_tokens=max_tokens, seed=seed),
            self.now_s,
            priority,
            deadline_s,
            tenant,
            lane=lane,
            queue_deadline_s=queue_deadline_s,
            n=n,
            best_of=n,
        )
        return self.submit_request(request)

    def submit_request(self, request: Request) -> str:
        choices = further_choices(request)
        for choice in (request, *choices):
            self.records[choice.request_id] = Record(choice, number=len(self.records))
        self.handle(Submitted(request, choices=choices))
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

    def limit(self, **quotas: Quota) -> None:
        """These and no other tenants have a quota from now on."""
        self.quotas = quotas
        self.handle(QuotasChanged(Quota(), quotas))

    def pause(self) -> None:
        self.paused = True
        self.handle(QueuePaused("by ann: a test"))

    def change_policy(self, event: PolicyChanged) -> None:
        """Whatever overtakes there were under the policy of before do not count."""
        self.config = replace(self.config, policy=event.policy, fair_share=event.fair_share, lane_shares=event.lane_shares)
        for record in self.records.values():
            record.overtaken = 0
        self.handle(event)

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
        issued = [effect for effect in self.handle(PlanDue(executor, self.max_steps)) if isinstance(effect, PlanIssued)]
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
        request_id = next(i for i, record in self.records.items() if record.request.sampling.seed == death.args[0])
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
        self.limit(**self.quotas)
        self.kills.clear()
        if self.paused:
            self.handle(QueuePaused("by ann: a test"))
        for name in self.drained:
            self.handle(ExecutorDrained(name, "by ann: a test"))
        for record in [r for r in self.records.values() if r.state not in TERMINAL]:
            record.overtaken = 0
            waiting = record.state is State.WAITING
            gang = [r.request for r in self.group(record) if r.state is State.WAITING] if waiting else [record.request]
            # Choices that have not run are admitted together: the first of them brings the others.
            if gang[0] is record.request:
                self.handle(Submitted(gang[0], tuple(record.output), record.state, tuple(gang[1:])))
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

    def group(self, record: Record) -> list[Record]:
        """All choices of a request, in order."""
        first = record.request.parent or record.request.request_id
        return [self.records[choice_id] for choice_id in choice_ids(self.records[first].request)]

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

    def _check_groups(self, effects: list[Effect]) -> None:
        """Where one choice of a request has been admitted, none that has not ended still waits for its first admission."""
        for effect in effects:
            if isinstance(effect, Transitioned) and effect.before is State.WAITING and effect.after is State.PREFILL:
                group = self.group(self.records[effect.request_id])
                assert all(record.state is not State.WAITING for record in group), "a part of a group was admitted"

    def _check_fairness(self, effects: list[Effect]) -> None:
        """Who is admitted for the first time passes no preempted equal, and no waiting one more often than allowed."""
        admitted = [
            self.records[effect.request_id]
            for effect in effects
            if isinstance(effect, Transitioned) and (effect.before, effect.after) == (State.WAITING, State.PREFILL)
        ]
        # Choices that are admitted together overtake once, in the place of the first of them.
        admitted = list({record.request.parent or record.request.request_id: record for record in reversed(admitted)}.values())
        assert not (admitted and (self.paused or list(self.executors) == self.drained)), "admitted though nobody may be"
        for new in admitted:
            for old in self.records.values():
                if self._has_entry(old) and self._share_a_line(old.request, new.request):
                    self._check_passed(old, new)

    def _has_entry(self, record: Record) -> bool:
        """Whether it stands in the queue, for itself or for the choices that wait with it."""
        if record.state is not State.WAITING:
            return record.state in QUEUED
        return record is next(choice for choice in self.group(record) if choice.state is State.WAITING)

    def _share_a_line(self, one: Request, other: Request) -> bool:
        if one.tenant in self.quotas:
            # It may wait for its quota while others overtake it.
            return False
        return one.lane == other.lane and (not self.config.fair_share or one.tenant == other.tenant)

    def _check_passed(self, old: Record, new: Record) -> None:
        policy, name = self.core.ordering.policy, new.request.request_id
        ahead = new.request.priority - old.request.priority if policy.name == "priority" else 0
        assert ahead >= 0 or self._may_age(new), f"{name} ran before one of higher priority"
        if policy.name in ("fcfs", "lpm", "priority"):
            assert ahead or old.state is not State.PREEMPTED, f"{name} ran before a preempted equal"
        if policy.name == "fcfs":
            old.overtaken += old.number < new.number
            assert old.overtaken <= self.config.max_overtakes, f"{old.request.request_id} starves"

    def _may_age(self, record: Record) -> bool:
        waited_s = self.now_s - record.request.arrival_s
        return self.config.ageing_turn > 0 and waited_s >= self.config.max_priority_wait_s

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
