"""Random plans on a small pool: blocks are conserved, no token is crossed, whatever order things come in, with and without a
prefix cache, and with a host tier of a few blocks or many behind it. The runner reads every context back through the block table,
so a block shared or copied by mistake shows."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tokenmill_executor.engine import Engine
from tokenmill_executor.host_tier import Rate
from tokenmill_executor.prefix import short_hash
from tokenmill_executor.records import Admission, Blocks, Plan, PrefixChanges, Result, SequenceFault, SequenceFinish
from tokenmill_executor.runner import ONE_GROUP, BlockGroup

from tests.fakes.runner import POISON, OracleRunner, oracle_token
from tests.unit.engine.plans import admission, hasher

MAX_MODEL_LEN = 24
GROUPS = [ONE_GROUP, ONE_GROUP, (BlockGroup(3, 1),), (BlockGroup(), BlockGroup(5), BlockGroup(1, 6))]


def blocks_held(group: BlockGroup, computed: int, size: int) -> int:
    """Blocks with a position that the token at position `computed` or a later one sees, or that lie among the sinks'."""
    kept = {position // size for position in range(computed)}
    if group.sliding_window is not None:
        sinks = set(range(-(-group.sinks // size)))
        # Up to the token to come: the rest of its block is kept to be written to.
        kept &= sinks | {position // size for position in range(max(0, computed - group.sliding_window + 1), computed + 1)}
    return len(kept)


@dataclass
class Model:
    """What the test itself knows of a sequence."""

    tokens: list[int]
    num_prompt: int
    max_tokens: int
    computed: int = 0

    @property
    def poisoned(self) -> bool:
        return POISON in self.tokens

    def ends(self) -> bool:
        return len(self.tokens) - self.num_prompt >= self.max_tokens or len(self.tokens) >= MAX_MODEL_LEN


def with_itself(group: BlockGroup) -> BlockGroup:
    """While a token is computed, its own block is held beside what it sees before."""
    return group if group.sliding_window is None else replace(group, sliding_window=group.sliding_window + 1)


class RandomPlans(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.live: dict[int, Model] = {}
        self.gone: list[tuple[int, Model]] = []
        self.next_id = 1
        self.plan_id = 0
        self.blocks: Blocks | None = None

    @initialize(
        num_blocks=st.integers(2, 8),
        block_size=st.integers(1, 4),
        caching=st.booleans(),
        groups=st.sampled_from(GROUPS),
        steps_at_once=st.integers(1, 4),
        late=st.integers(0, 1),
    )
    def start(
        self, num_blocks: int, block_size: int, caching: bool, groups: tuple[BlockGroup, ...], steps_at_once: int, late: int
    ) -> None:
        runner = OracleRunner(MAX_MODEL_LEN, groups=groups, steps_at_once=steps_at_once, late=late)
        self._start(runner, num_blocks, block_size, caching, num_host_blocks=0)

    def _start(self, runner: OracleRunner, num_blocks: int, block_size: int, caching: bool, num_host_blocks: int) -> None:
        groups = runner.groups
        self.groups = groups
        self.num_blocks = num_blocks * len(groups)
        self.block_size = block_size
        self.caching = caching = caching and groups == ONE_GROUP
        self.forked = False
        self.mirror: set[int] = set()
        self.engine = Engine(
            runner,
            self.num_blocks,
            block_size,
            max_num_seqs=4,
            hasher=hasher(block_size) if caching else None,
            num_host_blocks=num_host_blocks,
        )

    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        """Releases (cancels, preemptions), admissions (some of them resumed) and advances in one plan, as a scheduler might."""
        release = data.draw(st.lists(st.sampled_from(sorted(self.live) or [0]), max_size=2, unique=True), "release")
        for sequence_id in release:
            if (model := self.live.pop(sequence_id, None)) is not None:
                self.gone.append((sequence_id, model))
        admit = [self._admission(data) for _ in range(data.draw(st.integers(0, 2), "admissions"))]
        named = sorted({*self.live, *(sequence_id for sequence_id, _ in self.gone[-2:])})
        ids = data.draw(st.lists(st.sampled_from(named), max_size=4, unique=True) if named else st.just([]), "advance")
        most = [data.draw(st.integers(0, 9)) for _ in ids]
        steps = data.draw(st.sampled_from([1, 1, 2, 3, 6]), "steps")
        self.plan_id += 1
        self._compare(self.engine.carry_out(Plan(1, self.plan_id, release, admit, ids, most, steps)), most, steps)

    def _admission(self, data: st.DataObject) -> Admission:
        sequence_id, self.next_id = self.next_id, self.next_id + 1
        resumable = [model for _, model in self.gone if not model.ends() and len(model.tokens) > model.num_prompt]
        fork_of = data.draw(st.sampled_from([0, *sorted(self.live)]), "fork of")
        if resumable and data.draw(st.sampled_from(["new", "resumed"]), "kind") == "resumed":
            old = resumable[-1]
            model = Model(list(old.tokens), old.num_prompt, old.max_tokens)
        elif fork_of and data.draw(st.booleans(), "same prompt"):
            other = self.live[fork_of]
            model = Model(other.tokens[: other.num_prompt], other.num_prompt, data.draw(st.integers(1, 8), "max_tokens"))
        else:
            prompt = self._prompt(data)
            model = Model(prompt, len(prompt), data.draw(st.integers(1, 8), "max_tokens"))
        self.live[sequence_id] = model
        plain = admission(sequence_id, model.tokens[: model.num_prompt], model.tokens[model.num_prompt :], model.max_tokens)
        # Also of one with another prompt, or that is gone by then: nothing may come of it.
        return replace(plain, fork_of=fork_of)

    def _prompt(self, data: st.DataObject) -> list[int]:
        return data.draw(st.lists(st.sampled_from([1, 1, 1, 2, POISON]), min_size=1, max_size=10), "prompt")

    def _compare(self, result: Result, most: list[int], steps: int = 1) -> None:
        self.blocks = result.blocks
        self._mirror(result.prefix)
        cached = list(result.num_cached) or [0] * len(most)
        faults = {fault.sequence_id: fault.fault for fault in result.faults}
        tokens = list(result.token_ids)
        assert 1 <= result.num_steps <= steps
        for index, sequence_id in enumerate(result.sequence_ids):
            model = self.live.get(sequence_id)
            computed, sampled, finish = result.num_computed[index], result.num_sampled[index], result.finishes[index]
            if model is None or most[index] == 0 or (sequence_id in faults and not sampled):
                assert (computed, sampled, finish, cached[index]) == (0, 0, SequenceFinish.NONE, 0)
            else:
                self._take_cached(model, cached[index])
                first = min(most[index], len(model.tokens) - model.computed)
                assert computed == first + max(0, sampled - 1)
                assert (sampled > 0) == (model.computed + first == len(model.tokens))
                model.computed += computed
                for left in reversed(range(sampled)):
                    assert tokens.pop(0) == oracle_token(model.tokens)
                    model.tokens.append(oracle_token(model.tokens))
                    assert (finish == SequenceFinish.LENGTH and left == 0) == model.ends()
                stays_behind = sampled and not finish and sequence_id not in faults
                assert not stays_behind or sampled == min(steps, most[index] - first + 1)
            if finish or faults.get(sequence_id) in (SequenceFault.TOO_LONG, SequenceFault.ERROR):
                self.gone.append((sequence_id, self.live.pop(sequence_id)))
        assert not tokens
        self._explain(faults)

    def _take_cached(self, model: Model, count: int) -> None:
        """Only at the first advance, whole blocks, and never the last token; without a cache, of the prompt alone."""
        most = len(model.tokens) - 1 if self.caching else min(model.num_prompt, len(model.tokens) - 1)
        assert count == 0 or (model.computed == 0 and count % self.block_size == 0 and count <= most)
        self.forked |= count > 0
        model.computed += count

    def _mirror(self, changes: PrefixChanges) -> None:
        assert self.mirror >= set(changes.dropped)
        self.mirror -= set(changes.dropped)
        for stored, parent in zip(changes.stored, changes.parents, strict=True):
            assert parent in self.mirror or parent == 0
            self.mirror.add(stored)

    def _explain(self, faults: dict[int, SequenceFault]) -> None:
        for sequence_id, fault in faults.items():
            model = self.live.get(sequence_id) or next(model for other, model in self.gone if other == sequence_id)
            if fault is SequenceFault.ERROR:
                assert model.poisoned
            if fault is SequenceFault.TOO_LONG:
                assert self._least(len(model.tokens)) > self.num_blocks

    def _least(self, tokens: int) -> int:
        """Blocks that a sequence needs at most when it is computed token by token; each group by itself."""
        size = self.block_size
        return sum(
            max(blocks_held(with_itself(group), computed, size) for computed in range(1, tokens + 1)) for group in self.groups
        )

    @invariant()
    def books_balance(self) -> None:
        if self.blocks is None:
            return
        self.engine.check()
        assert self.blocks.free + self.blocks.cached + self.blocks.held == self.num_blocks
        held = [sum(blocks_held(group, model.computed, self.block_size) for group in self.groups) for model in self.live.values()]
        assert max(held, default=0) <= self.blocks.held <= sum(held)
        if not self.caching:
            assert self.blocks.cached == 0
            assert self.forked or self.blocks.held == sum(held)
        here = {short_hash(digest) for digest in self.engine._blocks.pool.index._blocks}
        host = set() if self.engine.host_tier is None else {short_hash(digest) for digest, _ in self.engine.host_tier.items()}
        assert self.mirror == here | host
        assert not here & host

    @precondition(lambda self: self.plan_id > 0)
    @rule()
    def new_epoch(self) -> None:
        self._release_all()
        self.live.clear()
        self.gone.clear()

    def teardown(self) -> None:
        if self.plan_id:
            self._release_all()

    def _release_all(self) -> None:
        """Nothing is held, what is cached stays, and the next scheduler is told all of it."""
        standing = self.engine.release_all()
        self.blocks = standing.blocks
        cached = len(self.mirror) - (0 if self.engine.host_tier is None else len(self.engine.host_tier))
        assert standing.blocks == Blocks(self.num_blocks - cached, cached, 0)
        assert set(standing.prefix.stored) == self.mirror
        assert not standing.prefix.dropped


class RandomSwaps(RandomPlans):
    """The same with a host tier of few slots or many: a few prompts that take turns with a small pool, given up and taken up again.

    At times it is cheaper to copy blocks back, at times to compute them.
    """

    @initialize(num_blocks=st.integers(4, 7), block_size=st.integers(1, 2), num_host_blocks=st.sampled_from([1, 3, 6, 40]))
    def start(self, num_blocks: int, block_size: int, num_host_blocks: int) -> None:
        runner = OracleRunner(MAX_MODEL_LEN, steps_at_once=3)
        self._start(runner, num_blocks, block_size, caching=True, num_host_blocks=num_host_blocks)

    @rule(seconds=st.sampled_from([0.0, 0.0, 1e9]))
    def copies_take(self, seconds: float) -> None:
        assert self.engine.host_tier is not None
        self.engine.host_tier._copy = Rate(1.0, seconds)

    def _prompt(self, data: st.DataObject) -> list[int]:
        first, length = data.draw(st.sampled_from([1, 1, 1, 2, 2, 3, POISON]), "first"), data.draw(st.integers(3, 8), "length")
        return [first, *range(10, 9 + length)]

    @rule(data=st.data(), turns=st.integers(2, 6))
    def take_turns(self, data: st.DataObject, turns: int) -> None:
        """Each time all that live make way for one, which is computed to its next token."""
        for _ in range(turns):
            release = sorted(self.live)
            self.gone += [(sequence_id, self.live.pop(sequence_id)) for sequence_id in release]
            admit = self._admission(data)
            self.plan_id += 1
            self._compare(self.engine.carry_out(Plan(1, self.plan_id, release, [admit], [admit.sequence_id], [20])), [20])
            self.engine.check()


RandomPlans.TestCase.settings = settings(max_examples=80, stateful_step_count=40, deadline=None, derandomize=True)
TestC14RandomPlans = RandomPlans.TestCase
RandomSwaps.TestCase.settings = settings(max_examples=40, stateful_step_count=30, deadline=None, derandomize=True)
TestC14RandomSwaps = RandomSwaps.TestCase
