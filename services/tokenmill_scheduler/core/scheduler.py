"""The pure scheduler: events in, effects out. (Contract; the implementation follows.)"""

from __future__ import annotations

from dataclasses import dataclass

from tokenmill_scheduler.core.records import Effect, Event


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits and choices, validated by the settings. The executor's own limits apply where they are lower."""

    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    batching: str = "continuous"
    policy: str = "fcfs"
    # static batching: start a batch that is not full once its oldest request has waited this long
    max_waiting_time_s: float = 0.05
    # share of an executor's blocks kept back from admissions, for sequences already running
    watermark: float = 0.01


class Scheduler:
    def __init__(self, config: SchedulerConfig) -> None: ...

    def handle(self, event: Event, now_s: float) -> list[Effect]:
        """Applies one event at time `now_s` (Unix seconds, never going back); the effects are in the order to be carried out."""
        raise NotImplementedError

    def owner(self, executor: str, sequence_id: int) -> str | None:
        """The request whose tokens a result for this sequence would be kept for; None if it would be dropped as stale."""
        raise NotImplementedError
