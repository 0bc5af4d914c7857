"""The scheduler machine against executors whose layers have sliding windows: all of them, and beside layers with full attention."""

from __future__ import annotations

from typing import ClassVar

from hypothesis import HealthCheck, settings
from tokenmill_scheduler.core.plans import BlockGroup, ExecutorDescription

from tests.property.test_scheduler_machine import SchedulerMachine
from tests.simulation.world import Record

SETTINGS = settings(
    max_examples=100, stateful_step_count=50, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)


def touched(group: BlockGroup, tokens: int, in_flight: int, size: int) -> int:
    """The most blocks that a stretch of window and tokens in flight touches, counted one by one, and the sinks' blocks."""
    if group.sliding_window == 0:
        return -(-tokens // size)
    stretch = group.sliding_window - 1 + in_flight
    most = max(len({position // size for position in range(start, start + stretch)}) for start in range(size))
    return min(-(-tokens // size), most + -(-group.sinks // size))


class WindowMachine(SchedulerMachine):
    GROUPS: ClassVar[tuple[BlockGroup, ...]] = (BlockGroup(3, 1),)

    def _fits(self, record: Record, executor: ExecutorDescription) -> bool:
        """As far as the scheduler promises: one by one for itself, in large chunks for choices that are to be held at once."""
        tokens = len(record.request.prompt) + len(record.output)
        together = sum(choice.path == "waiting failed" for choice in self.world.group(record))
        if record.path != "waiting failed" or together == 1:
            return self._blocks(executor, tokens, 1) <= executor.num_blocks
        config = self.world.config
        budget = min(executor.max_num_batched_tokens, config.max_num_batched_tokens)
        seqs = min(executor.max_num_seqs, budget, config.max_num_seqs)
        known = tokens + min(record.request.sampling.max_tokens - 1, 1)
        return together <= min(seqs, executor.num_blocks // self._blocks(executor, known, executor.pipeline_depth * budget))

    @staticmethod
    def _blocks(executor: ExecutorDescription, tokens: int, in_flight: int) -> int:
        return sum(touched(group, tokens, in_flight, executor.block_size) for group in executor.block_groups)


class MixedMachine(WindowMachine):
    GROUPS: ClassVar[tuple[BlockGroup, ...]] = (BlockGroup(), BlockGroup(5), BlockGroup(1, 3))


WindowMachine.TestCase.settings = SETTINGS
MixedMachine.TestCase.settings = SETTINGS
TestWindows = WindowMachine.TestCase
TestMixed = MixedMachine.TestCase
