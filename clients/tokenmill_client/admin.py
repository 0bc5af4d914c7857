"""The operator's calls."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from datetime import datetime

from tokenmill.admin.v1 import admin_pb2_grpc

from tokenmill_client.admin_records import Action, CancelOutcome, Executor, Load, Policy, RequestFilter, RequestLife
from tokenmill_client.records import Lane, RequestInfo
from tokenmill_client.transport import Transport
from tokenmill_client.wire import incoming, outgoing_admin


class AsyncAdmin:
    """Found as `AsyncClient.admin`. Every method raises a `TokenmillError`."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    async def list_requests(
        self,
        condition: RequestFilter | None = None,
        *,
        oldest_first: bool = False,
        by_priority: bool = False,
        page_size: int = 100,
        timeout: float | None = None,
    ) -> AsyncIterator[RequestInfo]:
        """All requests that meet the condition, page by page as they are read; newest first. `timeout` is a page's.

        `by_priority`: the highest first, and by age among equals.
        """
        page_token = ""
        while True:
            request = outgoing_admin.list_requests(condition, page_size, page_token, oldest_first, by_priority)
            response = await self._transport.call(self._stub.ListRequests, request, timeout)
            for info in response.requests:
                yield incoming.request_info(info)
            page_token = response.next_page_token
            if not page_token:
                return

    async def get_request(self, request_id: str, *, timeout: float | None = None) -> RequestLife:
        """A request with every move between states."""
        request = outgoing_admin.get_request_life(request_id)
        return incoming.request_life(await self._transport.call(self._stub.GetRequest, request, timeout))

    async def cancel_requests(
        self,
        request_ids: Sequence[str] = (),
        *,
        condition: RequestFilter | None = None,
        reason: str = "",
        dry_run: bool = False,
        timeout: float | None = None,
    ) -> tuple[CancelOutcome, ...]:
        """Cancels by id, or else all that meet the condition; `dry_run` answers what would be cancelled and changes nothing."""
        request = outgoing_admin.cancel_requests(request_ids, condition, reason, dry_run)
        response = await self._transport.call(self._stub.CancelRequests, request, timeout)
        return tuple(incoming.cancel_outcome(outcome) for outcome in response.outcomes)

    async def update_request(
        self,
        request_id: str,
        *,
        priority: int | None = None,
        deadline: datetime | None = None,
        reason: str = "",
        timeout: float | None = None,
    ) -> RequestInfo:
        """Changes what is given, of a request that has not ended."""
        request = outgoing_admin.update_request(request_id, priority, deadline, reason)
        response = await self._transport.call(self._stub.UpdateRequest, request, timeout)
        return incoming.request_info(response.request)

    async def retry_request(self, request_id: str, *, reason: str = "", timeout: float | None = None) -> str:
        """Submits a FAILED request again, to run detached; returns the new request's id."""
        request = outgoing_admin.retry_request(request_id, reason)
        return (await self._transport.call(self._stub.RetryRequest, request, timeout)).request_id

    async def pause_queue(self, *, reason: str = "", timeout: float | None = None) -> bool:
        """Waiting requests wait until `resume_queue`, also across restarts. False when it was paused already."""
        return not (await self._transport.call(self._stub.PauseQueue, outgoing_admin.pause_queue(reason), timeout)).unchanged

    async def resume_queue(self, *, reason: str = "", timeout: float | None = None) -> bool:
        """False when it was not paused."""
        return not (await self._transport.call(self._stub.ResumeQueue, outgoing_admin.resume_queue(reason), timeout)).unchanged

    async def get_policy(self, *, timeout: float | None = None) -> Policy:
        """Who runs sooner, as it is now."""
        response = await self._transport.call(self._stub.GetPolicy, outgoing_admin.get_policy(), timeout)
        return incoming.policy(response.policy, response.reason)

    async def set_policy(
        self,
        policy: str | None = None,
        *,
        fair_share: bool | None = None,
        lane_shares: Mapping[Lane | str, int] | None = None,
        reason: str = "",
        timeout: float | None = None,
    ) -> bool:
        """Changes what is given, while requests wait and run, until `reset_policy`, also across restarts. False when it was so.

        `lane_shares`, in per cent: a lane that is not among them keeps its own.
        """
        request = outgoing_admin.set_policy(policy, fair_share, lane_shares, reason)
        return not (await self._transport.call(self._stub.SetPolicy, request, timeout)).unchanged

    async def reset_policy(self, *, reason: str = "", timeout: float | None = None) -> bool:
        """Back to what the settings say. False when none was set."""
        return not (await self._transport.call(self._stub.ResetPolicy, outgoing_admin.reset_policy(reason), timeout)).unchanged

    async def drain_executor(self, name: str, *, reason: str = "", timeout: float | None = None) -> Executor:
        """Moves its work elsewhere and gives it none until `undrain_executor`, also across restarts."""
        response = await self._transport.call(self._stub.DrainExecutor, outgoing_admin.drain_executor(name, reason), timeout)
        return incoming.executor(response.executor)

    async def undrain_executor(self, name: str, *, reason: str = "", timeout: float | None = None) -> Executor:
        response = await self._transport.call(self._stub.UndrainExecutor, outgoing_admin.undrain_executor(name, reason), timeout)
        return incoming.executor(response.executor)

    async def list_actions(self, target: str = "", *, page_size: int = 100, timeout: float | None = None) -> AsyncIterator[Action]:
        """What operators did, to a request or an executor or at all, newest first, page by page. `timeout` is a page's."""
        page_token = ""
        while True:
            request = outgoing_admin.list_actions(target, page_size, page_token)
            response = await self._transport.call(self._stub.ListActions, request, timeout)
            for action in response.actions:
                yield incoming.action(action)
            page_token = response.next_page_token
            if not page_token:
                return

    async def list_executors(self, *, timeout: float | None = None) -> tuple[Executor, ...]:
        response = await self._transport.call(self._stub.ListExecutors, outgoing_admin.list_executors(), timeout)
        return tuple(incoming.executor(executor) for executor in response.executors)

    async def get_load(self, *, timeout: float | None = None) -> Load:
        return incoming.load(await self._transport.call(self._stub.GetLoad, outgoing_admin.get_load(), timeout))

    @property
    def _stub(self) -> admin_pb2_grpc.AdminServiceAsyncStub:
        return admin_pb2_grpc.AdminServiceStub(self._transport.channel)
