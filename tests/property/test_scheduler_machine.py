"""The scheduler core against model executors with tiny limits, under any order of events Hypothesis can think of.

Every event is followed by all invariants and by the checks of `World` (legal transitions, the oracle's tokens, each index once).
Results are delayed, doubled, re-ordered against all other events, and lost with their executor. At the end faults stop, and all
must end with exactly the oracle's tokens and all blocks free.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tokenmill_scheduler.core.admission import ADMISSION_MODES
from tokenmill_scheduler.core.events import PolicyChanged, ResultArrived, TextStop
from tokenmill_scheduler.core.plans import FULL_ATTENTION, BlockGroup, ExecutorDescription, SequenceFault
from tokenmill_scheduler.core.policy import POLICIES
from tokenmill_scheduler.core.quotas import Quota
from tokenmill_scheduler.core.request import TERMINAL, FinishReason, Lane, State
from tokenmill_scheduler.core.scheduler import SchedulerConfig

from tests.simulation.world import Record, World, description

NAMES = ("x", "y")
EXECUTORS = st.sampled_from(NAMES)
# Prompt, output and priority: short ones, one-token ones, and those that outgrow the smallest pools.
SHAPES = st.tuples(st.one_of(st.integers(1, 4), st.integers(1, 14)), st.one_of(st.just(1), st.integers(2, 9)), st.integers(0, 2))
LANES = st.sampled_from([Lane.STANDARD, Lane.STANDARD, Lane.REAL_TIME, Lane.BATCH])


class SchedulerMachine(RuleBasedStateMachine):
    """Executor y is larger and of another shape than x, and serves the same model."""

    GROUPS: ClassVar[tuple[BlockGroup, ...]] = FULL_ATTENTION
    # Slots run short, not blocks, and plans are of several steps.
    ROOMY: ClassVar[bool] = False

    @initialize(
        policy=st.sampled_from(POLICIES),
        batching=st.sampled_from(["continuous", "continuous", "static"]),
        num_blocks=st.integers(2, 8),
        max_num_seqs=st.integers(1, 4),
        budget=st.integers(2, 12),
        depth=st.integers(1, 3),
        max_overtakes=st.integers(0, 2),
        overlap=st.booleans(),
        two=st.booleans(),
        caching=st.booleans(),
        ageing_turn=st.integers(0, 3),
        fair_share=st.booleans(),
        admission=st.sampled_from(ADMISSION_MODES),
        max_steps=st.integers(1, 5),
        least_shared=st.sampled_from([1, 3, 128]),
        first=st.lists(SHAPES, min_size=3, max_size=8),
    )
    def start(
        self,
        policy: str,
        batching: str,
        num_blocks: int,
        max_num_seqs: int,
        budget: int,
        depth: int,
        max_overtakes: int,
        overlap: bool,
        two: bool,
        caching: bool,
        ageing_turn: int,
        fair_share: bool,
        admission: str,
        max_steps: int,
        least_shared: int,
        first: list[tuple[int, int, int]],
    ) -> None:
        if self.ROOMY:
            num_blocks, budget, depth, max_steps, two = 8 * num_blocks, 2 * budget, min(depth, 2), 1 + max_steps, False
        config = SchedulerConfig(
            max_num_seqs,
            budget,
            batching,
            policy,
            0.5,
            0.2,
            max_overtakes,
            ageing_turn,
            fair_share=fair_share,
            admission=admission,
            least_shared=least_shared,
        )
        shapes = [
            description("x", block_size=2, num_blocks=num_blocks, max_model_len=24, pipeline_depth=depth, caching=caching),
            description("y", block_size=3, num_blocks=8, max_model_len=24, max_num_seqs=2, caching=caching),
        ]
        if self.GROUPS != FULL_ATTENTION:
            shapes = [
                replace(shape, num_blocks=len(self.GROUPS) * shape.num_blocks, block_groups=self.GROUPS, caches_prefixes=False)
                for shape in shapes
            ]
        shapes = [replace(shape, multi_step=max_steps > 1) for shape in shapes]
        self.world = World(config, *shapes[: 2 if two else 1], overlap=overlap)
        self.world.max_steps = max_steps
        self.lost: set[str] = set()
        self.stopped_early: set[str] = set()
        self.faulted = False
        self.poisoned: set[str] = set()
        # Executors were lost of something else than poison, which can fall on an innocent suspect's trial.
        self.accidents = False
        for shape in first:
            self._submit(shape)

    def _name(self, name: str) -> str:
        return name if name in self.world.executors else "x"

    # ---- requests ----

    @rule(
        shapes=st.lists(SHAPES, min_size=1, max_size=4),
        wait=st.none() | st.integers(0, 3),
        queue_wait=st.none() | st.integers(0, 3),
        lane=LANES,
    )
    def submit(self, shapes: list[tuple[int, int, int]], wait: int | None, queue_wait: int | None, lane: Lane) -> None:
        for shape in shapes:
            self._submit(shape, self._at(wait), self._at(queue_wait), lane)

    @rule(shape=SHAPES, n=st.integers(2, 4), wait=st.none() | st.integers(0, 3), lane=LANES)
    def submit_choices(self, shape: tuple[int, int, int], n: int, wait: int | None, lane: Lane) -> None:
        self._submit(shape, self._at(wait), None, lane, n)

    @rule(shape=SHAPES, data=st.data())
    def submit_poison(self, shape: tuple[int, int, int], data: st.DataObject) -> None:
        """A request with a token in its prompt that kills every executor that computes it."""
        request_id = self._submit(shape)
        self.poisoned.add(request_id)
        position = data.draw(st.integers(0, shape[0] - 1))
        for executor in self.world.executors.values():
            executor.poison[int(request_id[1:])] = position

    def _submit(
        self,
        shape: tuple[int, int, int],
        deadline_s: float | None = None,
        queue_deadline_s: float | None = None,
        lane: Lane = Lane.STANDARD,
        n: int = 1,
    ) -> str:
        prompt, max_tokens, priority = shape
        return self.world.submit(
            len(self.world.records) + 1,
            prompt,
            max_tokens,
            priority=priority,
            deadline_s=deadline_s,
            queue_deadline_s=queue_deadline_s,
            lane=lane,
            n=n,
            tenant=f"t{len(self.world.records) % 3}",
        )

    def _at(self, wait_s: int | None) -> float | None:
        return None if wait_s is None else self.world.now_s + wait_s

    @precondition(lambda self: self.world.records)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        self.world.cancel(data.draw(st.sampled_from(list(self.world.records))))

    @precondition(lambda self: self.world.records)
    @rule(data=st.data(), priority=st.none() | st.integers(0, 3), wait=st.none() | st.integers(0, 5))
    def update(self, data: st.DataObject, priority: int | None, wait: int | None) -> None:
        request_id = data.draw(st.sampled_from(list(self.world.records)))
        self.world.update(request_id, priority, self._at(wait))

    @rule(policy=st.sampled_from(POLICIES), fair_share=st.booleans(), batch=st.integers(0, 60))
    def change_policy(self, policy: str, fair_share: bool, batch: int) -> None:
        self.world.change_policy(PolicyChanged(policy, fair_share, (40, 0, batch)))

    @rule(seconds=st.floats(0, 1))
    def tick(self, seconds: float) -> None:
        self.world.tick(seconds)

    # ---- operators ----

    @rule()
    def pause_or_resume(self) -> None:
        if self.world.paused:
            self.world.resume()
        else:
            self.world.pause()

    @rule(seqs=st.none() | st.integers(0, 2), blocks=st.none() | st.integers(1, 8), rate=st.none() | st.integers(0, 20))
    def limit_tenants(self, seqs: int | None, blocks: int | None, rate: int | None) -> None:
        """Two of the three tenants, one of them in its blocks only."""
        self.world.limit(t0=Quota(seqs, None, rate), t1=Quota(None, blocks, None))

    @rule(name=EXECUTORS)
    def drain_or_undrain(self, name: str) -> None:
        name = self._name(name)
        if name in self.world.drained:
            self.world.undrain_executor(name)
        else:
            self.world.drain_executor(name)
            view = next(view for view in self.world.core.executors() if view.name == name)
            assert view.running == 0 or view.plans_out, "only what ends with the plans out stays"

    # ---- executors ----

    @rule(name=EXECUTORS)
    def plan(self, name: str) -> None:
        name = self._name(name)
        if name in self.lost:
            assert self.world.plan(name) is None
        else:
            self.world.plan(name)

    @rule(name=EXECUTORS)
    def step(self, name: str) -> None:
        executor = self.world.executors[self._name(name)]
        if self._name(name) not in self.lost and not executor.idle:
            self.world.try_step(self._name(name))

    @rule(name=EXECUTORS, times=st.integers(1, 5))
    def go_on(self, name: str, times: int) -> None:
        """Progress with a full pipeline in one rule, so that runs get far."""
        for _ in range(times):
            self.plan(name)
            self.plan(name)
            self.step(name)
            self.deliver(name)

    @rule(name=EXECUTORS)
    def deliver(self, name: str) -> None:
        name = self._name(name)
        if self.world.arriving[name]:
            self.world.deliver(name)

    @rule(name=EXECUTORS, keep=st.integers(0, 1))
    def deliver_with_text_stop(self, name: str, keep: int) -> None:
        name = self._name(name)
        if not self.world.arriving[name]:
            return
        result = self.world.arriving[name][0]
        owners = [(i, self.world.core.owner(name, i)) for i, n in zip(result.sequence_ids, result.num_sampled, strict=True) if n]
        owned = [(sequence_id, owner) for sequence_id, owner in owners if owner is not None]
        if owned:
            sequence_id, owner = owned[0]
            self.stopped_early.add(owner)
            self.world.deliver(name, {sequence_id: TextStop(keep)})
            assert self.world.state(owner) is State.DONE

    @rule(name=EXECUTORS)
    def deliver_again(self, name: str) -> None:
        """A doubled result, or one of an earlier epoch, changes nothing and is counted."""
        result = self.world.last_results.get(self._name(name))
        if result is not None:
            before = self.world.core.counters.stale_results
            assert self.world.handle(ResultArrived(self._name(name), result)) == []
            assert self.world.core.counters.stale_results == before + 1

    @precondition(lambda self: self.world.records)
    @rule(name=EXECUTORS, data=st.data(), fault=st.sampled_from(SequenceFault))
    def fault(self, name: str, data: st.DataObject, fault: SequenceFault) -> None:
        self.faulted = True
        request_id = data.draw(st.sampled_from(list(self.world.records)))
        self.world.executors[self._name(name)].inject[self.world.records[request_id].request.sampling.seed] = fault

    @rule(name=EXECUTORS, kind=st.sampled_from(["lose", "join", "restart"]))
    def disaster(self, name: str, kind: str) -> None:
        name = self._name(name)
        self.accidents = True
        if kind == "restart":
            self.world.restart_scheduler()
            self.lost.clear()
        elif kind == "join":
            self._join(name)
        elif name not in self.lost:
            self.lost.add(name)
            self.world.lose(name)

    def _join(self, name: str) -> None:
        """Also without having been lost: a higher epoch ends the lower one."""
        self.lost.discard(name)
        self.world.arriving[name].clear()
        self.world.rejoin(name)

    # ---- what holds ----

    @invariant()
    def forecast_is_honest(self) -> None:
        for executor in self.world.executors.values():
            assert executor.ran_out == 0, "a plan needed a block that was not there"

    def teardown(self) -> None:
        """Faults are over: all must end as they would have."""
        if not hasattr(self, "world"):
            return
        for name, executor in self.world.executors.items():
            executor.inject.clear()
            if name in self.lost:
                self._join(name)
            if name in self.world.drained:
                self.world.undrain_executor(name)
        if self.world.paused:
            self.world.resume()
        self.world.limit()
        self.world.drain()
        self.world.check_idle()
        self.forecast_is_honest()
        for request_id in self.world.records:
            self._check_end(request_id)

    def _check_end(self, request_id: str) -> None:
        record = self.world.records[request_id]
        assert record.ended is not None
        whole = self.world.expected(request_id)
        assert record.output == whole[: len(record.output)]
        assert sum(t.after in TERMINAL for t in record.transitions) == 1
        if record.state is State.DONE and request_id not in self.stopped_early:
            assert record.output == whole
            stopped = record.output[-1] == 0
            assert record.ended.finish_reason is (FinishReason.STOP if stopped else FinishReason.LENGTH)
        assert self.world.kills.get(request_id, 0) <= 2, "it has killed two executors and was given a third"
        if request_id in self.poisoned:
            assert record.state is not State.DONE, "it computed the token that kills"
        elif record.state is State.FAILED and record.ended.reason == "quarantined":
            assert self.accidents, "an innocent request was blamed"
        elif record.state is State.FAILED and not self.faulted:
            assert record.ended.error_code == 8
            assert not any(self._fits(record, e.description) for e in self.world.executors.values()), "failed although it fits"

    def _fits(self, record: Record, executor: ExecutorDescription) -> bool:
        """All that it had when it failed; choices that had not run are to be held at once, with one token more each."""
        tokens = len(record.request.prompt) + len(record.output)
        together = sum(choice.path == "waiting failed" for choice in self.world.group(record))
        if record.path != "waiting failed" or together == 1:
            return tokens <= executor.num_blocks * executor.block_size
        config = self.world.config
        seqs = min(executor.max_num_seqs, executor.max_num_batched_tokens, config.max_num_seqs, config.max_num_batched_tokens)
        blocks = -(-(tokens + min(record.request.sampling.max_tokens - 1, 1)) // executor.block_size)
        return together <= min(seqs, executor.num_blocks // blocks)


SchedulerMachine.TestCase.settings = settings(
    max_examples=250, stateful_step_count=50, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
TestScheduler = SchedulerMachine.TestCase
