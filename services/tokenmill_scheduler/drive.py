"""One executor as it is driven in one epoch, with what its results tell. Must not know: the core's state, connections."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from tokenmill_scheduler.core.plans import Blocks, Plan, Result
from tokenmill_scheduler.desk.records import ExecutorStatus
from tokenmill_scheduler.pacing import Pacer
from tokenmill_scheduler.wire import ExecutorFacts


class PlanSender(Protocol):
    @property
    def address(self) -> str: ...

    def send(self, plan: Plan) -> None:
        """Returns at once."""


@dataclass(slots=True)
class Drive:
    """`joined_s` is Unix seconds; the pacer's times are those of the event loop. `blocks` stand as in the last result.

    `stored`: hashes of the blocks that were in its prefix cache when it joined.
    """

    link: PlanSender
    facts: ExecutorFacts
    epoch: int
    pacer: Pacer
    blocks: Blocks
    joined_s: float
    connected: bool = True
    stored: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        return self.facts.description.name

    def answered(self, result: Result, now_s: float) -> None:
        self.pacer.answered(result.times, now_s, result.num_steps)
        self.blocks = result.blocks

    def status(self, running: int, draining: bool, now_s: float) -> ExecutorStatus:
        """`running`: sequences it has, which only the core knows; `draining`: it is drained, or will be once it has none."""
        return ExecutorStatus(
            name=self.name,
            address=self.link.address,
            model=self.facts.description.model,
            connected=self.connected,
            epoch=self.epoch,
            device=self.facts.device,
            block_size=self.facts.description.block_size,
            blocks=self.blocks,
            running=running,
            steps=self.pacer.steps,
            idle_share=self.pacer.idle_share(now_s),
            joined_s=self.joined_s if self.connected else None,
            draining=draining,
        )
