"""Fields that more than one message has."""

from __future__ import annotations

from tokenmill_scheduler.intake.violations import InvalidArgument, Violations

MIN_PRIORITY, MAX_PRIORITY = -1000, 1000
MAX_REASON_CHARS = 1_000


def check_priority(priority: int, field: str, violations: Violations) -> None:
    holds = MIN_PRIORITY <= priority <= MAX_PRIORITY
    violations.require(holds, field, f"must be from {MIN_PRIORITY} to {MAX_PRIORITY}; got {priority}")


def read_reason(reason: str, default: str) -> str:
    """Why a request is cancelled, for its record. Raises InvalidArgument when it is too long to keep."""
    if len(reason) > MAX_REASON_CHARS:
        raise InvalidArgument.of("reason", f"must have at most {MAX_REASON_CHARS} characters; got {len(reason)}")
    return reason or default
