"""Fields that more than one message has."""

from __future__ import annotations

import re

from tokenmill_scheduler.core.request import Lane
from tokenmill_scheduler.intake.violations import InvalidArgument, Violations

REQUEST_ID_WORDS = "must be 1 to 128 of letters, digits, '.', '_', ':' and '-'"
TENANT_WORDS = "must be 1 to 64 of letters, digits, '.', '_' and '-'"
LANE_WORDS = "must be one of the lanes of Lane"
MIN_PRIORITY, MAX_PRIORITY = -1000, 1000
MAX_REASON_CHARS = 1_000

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_TENANT = re.compile(r"[A-Za-z0-9._-]{1,64}")


def is_request_id(text: str) -> bool:
    return _REQUEST_ID.fullmatch(text) is not None


def is_tenant(text: str) -> bool:
    return _TENANT.fullmatch(text) is not None


def is_lane(number: int) -> bool:
    """The core's lanes have the numbers of the protocol's."""
    return number in Lane.__members__.values()


def read_request_id(request_id: str) -> str:
    """The id of a request that is asked about. Raises InvalidArgument for what no request can have as its id."""
    if not is_request_id(request_id):
        raise InvalidArgument.of("request_id", REQUEST_ID_WORDS)
    return request_id


def check_priority(priority: int, field: str, violations: Violations) -> None:
    holds = MIN_PRIORITY <= priority <= MAX_PRIORITY
    violations.require(holds, field, f"must be from {MIN_PRIORITY} to {MAX_PRIORITY}; got {priority}")


def read_reason(reason: str, default: str = "") -> str:
    """Why something is done, for the record. Raises InvalidArgument when it is too long to keep."""
    if len(reason) > MAX_REASON_CHARS:
        raise InvalidArgument.of("reason", f"must have at most {MAX_REASON_CHARS} characters; got {len(reason)}")
    return reason or default
