"""How large a request may be. One that is larger is refused by itself, with its largest field named.

gRPC would do so with less ado, but ends a whole Multiplex call, and every stream on it, for one message. So it takes at least what
clients share such a call with, and what is left of the limit is held here. Must not know: what requests mean.
"""

from __future__ import annotations

from google.protobuf.message import Message

from tokenmill_scheduler.desk.errors import Refused

# In the protocol: a larger request is given a call of its own.
MAX_SHARED_BYTES = 1 << 20
# What a message of a shared call has beside its request is a few bytes.
_ENVELOPE_BYTES = 1_024


class MessageTooLarge(Refused):
    """`field` is the path of what is largest in it."""

    def __init__(self, message: Message, size_bytes: int, max_bytes: int) -> None:
        self.field = largest_field(message)
        self.description = f"the message has {size_bytes:,} bytes, most of them here; at most {max_bytes:,} are taken"
        super().__init__(f"{self.field}: {self.description}", None, "max_message_bytes")


def received_bytes(max_message_bytes: int) -> int:
    """The limit for gRPC to hold."""
    return max(max_message_bytes, MAX_SHARED_BYTES + _ENVELOPE_BYTES)


def check_size(message: Message, size_bytes: int, max_bytes: int) -> None:
    """Raises MessageTooLarge."""
    if size_bytes > max_bytes:
        raise MessageTooLarge(message, size_bytes, max_bytes)


def largest_field(message: Message) -> str:
    """From the message on, as `request.prompt.text`; empty if nothing is set."""
    path = []
    while fields := message.ListFields():
        field, value = max(fields, key=lambda pair: type(message)(**{pair[0].name: pair[1]}).ByteSize())
        path.append(field.name)
        if not isinstance(value, Message):
            break
        message = value
    return ".".join(path)
