"""Fields that more than one message has."""

from __future__ import annotations

import re

from tokenmill.inference.v1.inference_pb2 import AttachRequest

from tokenmill_scheduler.core.choices import SEPARATOR
from tokenmill_scheduler.core.request import Lane, Request
from tokenmill_scheduler.intake.violations import InvalidArgument, Violations

REQUEST_ID_WORDS = "must be 1 to 128 of letters, digits, '.', '_', ':' and '-'"
TENANT_WORDS = "must be 1 to 64 of letters, digits, '.', '_' and '-'"
LANE_WORDS = "must be one of the lanes of Lane"
MIN_PRIORITY, MAX_PRIORITY = -1000, 1000
MAX_REASON_CHARS = 1_000

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_CHOICE = re.compile(r"[1-9][0-9]?")
_TENANT = re.compile(r"[A-Za-z0-9._-]{1,64}")


def is_request_id(text: str) -> bool:
    return _REQUEST_ID.fullmatch(text) is not None


def is_tenant(text: str) -> bool:
    return _TENANT.fullmatch(text) is not None


def is_lane(number: int) -> bool:
    """The core's lanes have the numbers of the protocol's."""
    return number in Lane.__members__.values()


def read_request_id(request_id: str) -> str:
    """The id of a request or of a choice that is asked about. Raises InvalidArgument for what none can have as its id."""
    group_id, separator, choice = request_id.partition(SEPARATOR)
    if not is_request_id(group_id) or (separator and not _CHOICE.fullmatch(choice)):
        raise InvalidArgument.of("request_id", REQUEST_ID_WORDS)
    return request_id


def read_next_indexes(message: AttachRequest, request: Request) -> tuple[int, ...]:
    """Where to begin with each choice of `request` that is given out. Raises InvalidArgument."""
    num_choices = request.n if request.choice == 0 else 1
    if len(message.next_indexes) not in (0, num_choices):
        words = f"must have one index for each of {num_choices} choices, or none; got {len(message.next_indexes)}"
        raise InvalidArgument.of("next_indexes", words)
    return tuple(message.next_indexes) or (message.next_index,) * num_choices


def check_priority(priority: int, field: str, violations: Violations) -> None:
    holds = MIN_PRIORITY <= priority <= MAX_PRIORITY
    violations.require(holds, field, f"must be from {MIN_PRIORITY} to {MAX_PRIORITY}; got {priority}")


def read_reason(reason: str, default: str = "") -> str:
    """Why something is done, for the record. Raises InvalidArgument when it is too long to keep."""
    if len(reason) > MAX_REASON_CHARS:
        raise InvalidArgument.of("reason", f"must have at most {MAX_REASON_CHARS} characters; got {len(reason)}")
    return reason or default
