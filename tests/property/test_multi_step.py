"""The scheduler machine where slots run short, not blocks: those of sequences that end in plans of several steps are given away."""

from __future__ import annotations

from typing import ClassVar

from hypothesis import HealthCheck, settings

from tests.property.test_scheduler_machine import SchedulerMachine


class RoomyMachine(SchedulerMachine):
    ROOMY: ClassVar[bool] = True


RoomyMachine.TestCase.settings = settings(
    max_examples=100, stateful_step_count=50, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
TestRoomy = RoomyMachine.TestCase
