"""Many streams over one call: a client that keeps many requests open gets what is new of all of them in one message.

To a stream, its part of such a call looks as a call of its own does: it is read and cancelled, and fails with gRPC's errors. A
server that is older and has no such calls is given one for each stream. Must not know: what events mean, how a stream survives.
"""

from __future__ import annotations

import asyncio
import time

from tokenmill.inference.v1 import inference_pb2 as pb
from tokenmill.inference.v1.inference_pb2_grpc import InferenceServiceStub

from tokenmill_client.call import Request, StreamCall
from tokenmill_client.exchange import Exchange
from tokenmill_client.line import Line
from tokenmill_client.transport import Transport

# A larger request has a call of its own: it would keep the others waiting, and one that a server finds too large ends its call.
_MAX_SHARED_BYTES = 1 << 20
# A server without such calls is asked again after this time.
OLD_FOR_S = 60.0


class Multiplexer:
    """Opens streams at the address that the transport is at."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._exchanges: dict[str, list[Exchange]] = {}
        # Addresses of servers that have no such calls, and until when that is believed: one may be upgraded.
        self._without: dict[str, float] = {}

    def __del__(self) -> None:
        # As gRPC closes a channel that nobody holds any more. Streams hold their client, so none is open.
        for exchanges in self._exchanges.values():
            for one in exchanges:
                one.drop()

    def open(self, request: Request, timeout_s: float | None) -> StreamCall:
        address = self._transport.current
        if self._without.get(address, 0.0) > time.monotonic() or request.ByteSize() > _MAX_SHARED_BYTES:
            return self._alone(request, timeout_s)
        return Line(self._exchange(address), request, timeout_s, lambda left_s: self._fall_back(address, request, left_s))

    async def close(self) -> None:
        """Every stream ends as one does that is cancelled."""
        await asyncio.gather(*[one.close() for exchanges in self._exchanges.values() for one in exchanges])

    def _exchange(self, address: str) -> Exchange:
        """The first with room, of those that are open or new."""
        exchanges = self._exchanges[address] = [one for one in self._exchanges.get(address, ()) if not one.is_over]
        for exchange in exchanges:
            if exchange.has_room:
                return exchange
        exchanges.append(Exchange(self._transport))
        return exchanges[-1]

    def _fall_back(self, address: str, request: Request, timeout_s: float | None) -> StreamCall:
        self._without[address] = time.monotonic() + OLD_FOR_S
        return self._alone(request, timeout_s)

    def _alone(self, request: Request, timeout_s: float | None) -> StreamCall:
        # A stream that is left cancels it.
        self._transport.has_left_calls = True
        stub = InferenceServiceStub(self._transport.channel)
        if isinstance(request, pb.GenerateRequest):
            return stub.Generate(request, timeout=timeout_s, metadata=self._transport.metadata)
        return stub.Attach(request, timeout=timeout_s, metadata=self._transport.metadata)
