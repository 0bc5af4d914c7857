"""What was raised as a gRPC status with rich details: which code, which reason, and what a client can do about it.

Every status has an ErrorInfo whose reason a client can tell apart; RetryInfo says when to come again, BadRequest which fields are
at fault. What we did not foresee is INTERNAL with an id to find it in the log by; its own words stay here. Must not know: calls.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterable

import structlog
from google.rpc import code_pb2, error_details_pb2, status_pb2

from tokenmill_scheduler.desk import errors
from tokenmill_scheduler.intake import InvalidArgument
from tokenmill_scheduler.intake.violations import Violation
from tokenmill_scheduler.ledger.errors import LeaseLost, LedgerUnavailable
from tokenmill_scheduler.servicers import auth
from tokenmill_scheduler.servicers.sizes import MessageTooLarge

DOMAIN = "tokenmill"
_LEDGER_RETRY_S = 1.0
# Messages name what was asked for, which can be of any length; metadata, which carries them twice, is cut off at about 8 KB.
_MAX_MESSAGE_CHARS = 500

_REASONS: dict[type[Exception], tuple[int, str]] = {
    InvalidArgument: (code_pb2.INVALID_ARGUMENT, "INVALID_ARGUMENT"),
    errors.UnknownRequest: (code_pb2.NOT_FOUND, "UNKNOWN_REQUEST"),
    errors.RequestExists: (code_pb2.ALREADY_EXISTS, "REQUEST_EXISTS"),
    errors.UnknownModel: (code_pb2.NOT_FOUND, "UNKNOWN_MODEL"),
    errors.QueueFull: (code_pb2.RESOURCE_EXHAUSTED, "QUEUE_FULL"),
    errors.TenantLimit: (code_pb2.RESOURCE_EXHAUSTED, "TENANT_LIMIT"),
    MessageTooLarge: (code_pb2.RESOURCE_EXHAUSTED, "MESSAGE_TOO_LARGE"),
    errors.Overloaded: (code_pb2.RESOURCE_EXHAUSTED, "OVERLOADED"),
    errors.Unavailable: (code_pb2.UNAVAILABLE, "UNAVAILABLE"),
    errors.IndexAhead: (code_pb2.OUT_OF_RANGE, "INDEX_AHEAD"),
    errors.RequestEnded: (code_pb2.FAILED_PRECONDITION, "REQUEST_ENDED"),
    errors.RequestNotFailed: (code_pb2.FAILED_PRECONDITION, "REQUEST_NOT_FAILED"),
    errors.UnknownExecutor: (code_pb2.NOT_FOUND, "UNKNOWN_EXECUTOR"),
    auth.Unauthenticated: (code_pb2.UNAUTHENTICATED, "UNAUTHENTICATED"),
    auth.PermissionDenied: (code_pb2.PERMISSION_DENIED, "PERMISSION_DENIED"),
}

# What a submit can be refused for.
SUBMIT_REFUSALS = (
    "INVALID_ARGUMENT", "MESSAGE_TOO_LARGE", "UNKNOWN_MODEL", "REQUEST_EXISTS", "QUEUE_FULL", "TENANT_LIMIT", "OVERLOADED",
    "UNAVAILABLE", "UNAUTHENTICATED", "PERMISSION_DENIED", "INTERNAL",
)  # fmt: skip

log = structlog.get_logger(__name__)


def reason_of(error: Exception) -> str:
    """As in its status's ErrorInfo."""
    return _known(error)[1] or "INTERNAL"


def told_of(error: Exception, method: str) -> status_pb2.Status:
    """The status that tells a client of any `error`; one that is not foreseen is logged as of `method`."""
    return status_of(error) or _internal(error, method)


def status_of(error: Exception) -> status_pb2.Status | None:
    """The status that tells a client of `error`; None for one that is not foreseen."""
    error = _as_told(error)
    code, reason = _known(error)
    if not reason:
        return None
    status = status_pb2.Status(code=code, message=str(error)[:_MAX_MESSAGE_CHARS])
    metadata = {"limit": error.limit} if isinstance(error, errors.Refused) else {}
    status.details.add().Pack(error_details_pb2.ErrorInfo(reason=reason, domain=DOMAIN, metadata=metadata))
    if isinstance(error, InvalidArgument):
        status.details.add().Pack(_bad_request(error.violations))
    if isinstance(error, MessageTooLarge):
        status.details.add().Pack(_bad_request([Violation(error.field, error.description)]))
    if isinstance(error, errors.Refused | errors.Unavailable) and error.retry_delay_s is not None:
        status.details.add().Pack(_retry_info(error.retry_delay_s))
    return status


def _as_told(error: Exception) -> Exception:
    """What the ledger says, as the desk would say it."""
    if isinstance(error, LedgerUnavailable):
        return errors.Unavailable("the database cannot be reached", _LEDGER_RETRY_S)
    if isinstance(error, LeaseLost):
        return errors.Unavailable("another scheduler has taken over from this one", _LEDGER_RETRY_S)
    return error


def _known(error: Exception) -> tuple[int, str]:
    """Code and reason; the reason of an error that is not foreseen is empty."""
    return _REASONS.get(type(_as_told(error)), (code_pb2.INTERNAL, ""))


def _internal(error: Exception, method: str) -> status_pb2.Status:
    error_id = secrets.token_hex(4)
    log.error("RPC failed", method=method, error_id=error_id, exc_info=error)
    status = status_pb2.Status(code=code_pb2.INTERNAL, message=f"internal error {error_id}; the scheduler's log tells more")
    status.details.add().Pack(error_details_pb2.ErrorInfo(reason="INTERNAL", domain=DOMAIN, metadata={"error_id": error_id}))
    return status


def _bad_request(violations: Iterable[Violation]) -> error_details_pb2.BadRequest:
    details = error_details_pb2.BadRequest()
    for violation in violations:
        details.field_violations.add(field=violation.field, description=violation.description)
    return details


def _retry_info(delay_s: float) -> error_details_pb2.RetryInfo:
    info = error_details_pb2.RetryInfo()
    info.retry_delay.FromMilliseconds(math.ceil(delay_s * 1000))
    return info
