"""Values of single fields, for all messages that have them."""

from __future__ import annotations

from tokenmill.inference.v1 import types_pb2

from tokenmill_client.errors import ErrorDetails, InvalidRequest
from tokenmill_client.records import Lane, named


class Field:
    """Turns protobuf's complaint about a value into an InvalidRequest that names the field."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, TypeError | ValueError | OverflowError):
            details = ErrorDetails(violations=((self._name, str(error)),))
            raise InvalidRequest(f"{self._name}: {error}", details=details) from error


def lane_number(lane: Lane | str) -> types_pb2.Lane.ValueType:
    return types_pb2.Lane.Value(f"LANE_{named(Lane, lane).name}")
