"""A request as it stands: of several choices those that its stream gives out, in its order. Must not know: streams, the ledger."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from tokenmill.inference.v1 import inference_pb2 as pb

from tokenmill_scheduler.core.choices import choice_ids
from tokenmill_scheduler.core.request import TERMINAL
from tokenmill_scheduler.desk.port import Desk
from tokenmill_scheduler.desk.records import RequestStatus
from tokenmill_scheduler.ranking import Candidate, best
from tokenmill_scheduler.servicers import convert

TextOf = Callable[[RequestStatus, tuple[int, ...]], Awaitable[str]]


class Snapshots:
    def __init__(self, desk: Desk, text_of: TextOf) -> None:
        """`text_of` these tokens is what a stream of the request would have shown by now."""
        self._desk = desk
        self._text_of = text_of

    async def of(self, status: RequestStatus, include_output: bool) -> pb.GetRequestResponse:
        response = pb.GetRequestResponse(request=convert.request_info(status))
        further = choice_ids(status.stored.request)[1:]
        if not further:
            if include_output:
                await self._fill(response, status)
            return response
        statuses = [status, *await asyncio.gather(*map(self._desk.status, further))]
        for choice, place in enumerate(await self._given_out(statuses)):
            part = response.choices.add(choice=choice, request=convert.request_info(statuses[place]))
            if include_output:
                await self._fill(part, statuses[place])
        if response.choices:
            response.output_token_ids.extend(response.choices[0].output_token_ids)
            response.output_text = response.choices[0].output_text
        return response

    async def _given_out(self, statuses: Sequence[RequestStatus]) -> Sequence[int]:
        """The places of the choices that a client gets, in order."""
        request = statuses[0].stored.request
        if request.best_of == request.n:
            return range(request.n)
        if any(status.stored.state not in TERMINAL for status in statuses):
            return ()
        outputs = await asyncio.gather(*[self._desk.output(status.stored.request.request_id) for status in statuses])
        candidates = [Candidate(status.stored.state, output.logprobs) for status, output in zip(statuses, outputs, strict=True)]
        return best(candidates, request.n)

    async def _fill(self, into: pb.GetRequestResponse | pb.ChoiceSnapshot, status: RequestStatus) -> None:
        output = await self._desk.output(status.stored.request.request_id)
        into.output_token_ids.extend(output.token_ids)
        into.output_text = await self._text_of(status, output.token_ids)
