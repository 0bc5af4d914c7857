"""What a desk raises; `servicers/statuses.py` maps each to a gRPC status. Must not know: gRPC."""

from __future__ import annotations


class DeskError(Exception):
    """Base of what a desk raises."""


class UnknownRequest(DeskError):
    """No request has this id (NOT_FOUND)."""


class RequestExists(DeskError):
    """This id belongs to a request with another payload (ALREADY_EXISTS)."""


class UnknownModel(DeskError):
    """No executor has served this model (NOT_FOUND), or several models are served and none was named (INVALID_ARGUMENT)."""


class Refused(DeskError):
    """Base of refusals for want of room (RESOURCE_EXHAUSTED): `limit` names the setting that is at its end.

    Without a delay in seconds, coming again is of no use.
    """

    def __init__(self, message: str, retry_delay_s: float | None, limit: str) -> None:
        super().__init__(message)
        self.retry_delay_s = retry_delay_s
        self.limit = limit


class QueueFull(Refused):
    """The queue is at its limit, of requests or of tokens."""


class TenantLimit(Refused):
    """The tenant is at a limit or a quota of its own."""


class Overloaded(Refused):
    """There is too much work, and this lane is not taken until there is less."""


class Unavailable(DeskError):
    """The scheduler cannot accept now: no executor yet, ledger away, or shutting down (UNAVAILABLE with a retry delay)."""

    def __init__(self, message: str, retry_delay_s: float) -> None:
        super().__init__(message)
        self.retry_delay_s = retry_delay_s


class IndexAhead(DeskError):
    """Attach at an index beyond the tokens produced so far (OUT_OF_RANGE)."""


class UnknownExecutor(DeskError):
    """No executor of this name has joined (NOT_FOUND)."""


class RequestNotFailed(DeskError):
    """Only a FAILED request can be tried again (FAILED_PRECONDITION)."""


class RequestEnded(DeskError):
    """The change asked for needs a request that has not ended (FAILED_PRECONDITION)."""
