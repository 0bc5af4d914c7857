"""The Python client of tokenmill.

    from tokenmill_client import Client

    with Client("127.0.0.1:7600") as client:
        for delta in client.generate("Once upon a time", max_tokens=50):
            print(delta.text, end="", flush=True)

`AsyncClient` is the same for asyncio. Errors are in `tokenmill_client.errors`, records in `tokenmill_client.records` and, for
operators, `tokenmill_client.admin_records`.
"""

from tokenmill_client.admin_records import RequestFilter
from tokenmill_client.aio import DEFAULT_ADDRESS, AsyncClient
from tokenmill_client.blocking import Client, Stream
from tokenmill_client.errors import (
    AlreadyEnded,
    AlreadyExists,
    BrokenStream,
    DeadlineExceeded,
    InvalidRequest,
    NoSecureConnection,
    NotFound,
    PermissionDenied,
    QueueFull,
    RequestCancelled,
    RequestExpired,
    RequestFailed,
    RequestNotDone,
    ResourceExhausted,
    ServerError,
    StreamLost,
    TokenmillError,
    Unauthenticated,
    Unavailable,
)
from tokenmill_client.options import Message
from tokenmill_client.records import Delta, FinishReason, Lane, Output, RequestInfo, RequestState, Usage
from tokenmill_client.retry import RetryPolicy
from tokenmill_client.security import Tls
from tokenmill_client.stream import AsyncStream

__all__ = [
    "DEFAULT_ADDRESS",
    "AlreadyEnded",
    "AlreadyExists",
    "AsyncClient",
    "AsyncStream",
    "BrokenStream",
    "Client",
    "DeadlineExceeded",
    "Delta",
    "FinishReason",
    "InvalidRequest",
    "Lane",
    "Message",
    "NoSecureConnection",
    "NotFound",
    "Output",
    "PermissionDenied",
    "QueueFull",
    "RequestCancelled",
    "RequestExpired",
    "RequestFailed",
    "RequestFilter",
    "RequestInfo",
    "RequestNotDone",
    "RequestState",
    "ResourceExhausted",
    "RetryPolicy",
    "ServerError",
    "Stream",
    "StreamLost",
    "Tls",
    "TokenmillError",
    "Unauthenticated",
    "Unavailable",
    "Usage",
]
