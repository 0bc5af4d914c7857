"""A scheduler's gRPC face without a scheduler: real gRPC, tokens from an oracle, faults on demand.

Token i of a request is a function of request id and index, so that a lost, doubled or crossed token shows.
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import zip_longest
from typing import Any, NoReturn

import grpc
from google.protobuf.any_pb2 import Any as AnyMessage
from google.rpc import error_details_pb2, status_pb2
from tokenmill.admin.v1 import admin_pb2, admin_pb2_grpc
from tokenmill.inference.v1 import inference_pb2, inference_pb2_grpc, types_pb2

ENDED = (
    types_pb2.REQUEST_STATE_DONE,
    types_pb2.REQUEST_STATE_CANCELLED,
    types_pb2.REQUEST_STATE_EXPIRED,
    types_pb2.REQUEST_STATE_FAILED,
)
STARTED_AT = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)


def token(request_id: str, index: int) -> int:
    return zlib.crc32(f"{request_id}/{index}".encode()) % 50_000


def text_of(request_id: str, start: int, stop: int) -> str:
    """A token's text comes one token late, as text does that may become a stop string."""
    return "".join(f"{token(request_id, index)} " for index in range(max(0, start - 1), max(0, stop - 1)))


def tail_of(request_id: str, count: int) -> str:
    return f"{token(request_id, count - 1)} " if count else ""


def whole_text(request_id: str, count: int) -> str:
    return text_of(request_id, 0, count) + tail_of(request_id, count)


@dataclass
class FakeRequest:
    spec: inference_pb2.RequestSpec
    info: types_pb2.RequestInfo
    ended: threading.Event = field(default_factory=threading.Event)

    @property
    def max_tokens(self) -> int:
        return self.spec.sampling.max_tokens if self.spec.sampling.HasField("max_tokens") else 8

    @property
    def num_choices(self) -> int:
        return self.spec.sampling.n or 1


class FakeServer(inference_pb2_grpc.InferenceServiceServicer, admin_pb2_grpc.AdminServiceServicer):
    """`cuts[n]` ends the n-th stream with UNAVAILABLE after so many messages (None: it runs to its end).

    `hold_at` stops every stream before that token until the request is cancelled. `refusals` are raised by the next calls.
    `calls` and `tokens` are what calls named and showed. `failing_choices` end as FAILED.
    """

    def __init__(self, credentials: grpc.ServerCredentials | None = None) -> None:
        """With credentials it speaks TLS alone."""
        self._credentials = credentials
        self.requests: dict[str, FakeRequest] = {}
        self.cuts: list[int | None] = []
        self.hold_at: int | None = None
        self.failing_choices: list[int] = []
        self.refusals: list[status_pb2.Status] = []
        self.serving = True
        self.paused = ""
        shares = admin_pb2.LaneShares(real_time=50, standard=40, batch=10)
        self.policy = admin_pb2.GetPolicyResponse(policy=admin_pb2.Policy(policy="fcfs", lane_shares=shares))
        self.actions: list[admin_pb2.Action] = []
        self.calls: list[str] = []
        self.tokens: list[str] = []
        self.called = threading.Event()
        self.address = ""
        self._server: grpc.Server | None = None

    def start(self) -> None:
        """On the same address as before, if there was one."""
        self._server = grpc.server(ThreadPoolExecutor(64), options=[("grpc.so_reuseport", 0)])
        inference_pb2_grpc.add_InferenceServiceServicer_to_server(self, self._server)
        admin_pb2_grpc.add_AdminServiceServicer_to_server(self, self._server)
        health = grpc.unary_unary_rpc_method_handler(self._check_health)
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("grpc.health.v1.Health", {"Check": health}),))
        address = self.address or "127.0.0.1:0"
        if self._credentials is None:
            port = self._server.add_insecure_port(address)
        else:
            port = self._server.add_secure_port(address, self._credentials)
        self.address = f"127.0.0.1:{port}"
        self._server.start()

    def stop(self) -> None:
        if self._server is not None:
            self._server.stop(None).wait()
            self._server = None

    def refuse(self, code: grpc.StatusCode, message: str, *details: Any) -> None:
        """Makes the next call fail so."""
        status = status_pb2.Status(code=code.value[0], message=message)
        for detail in details:
            packed = AnyMessage()
            packed.Pack(detail)
            status.details.append(packed)
        self.refusals.append(status)

    # ---- inference -------------------------------------------------------------------------------------------------------------

    def Generate(self, request: inference_pb2.GenerateRequest, context: Any) -> Iterator[inference_pb2.GenerateResponse]:  # noqa: N802
        self._begin("Generate", context)
        cut = self._next_cut()
        accepted, _ = self._accept(request.request, context)
        for event in self._events(accepted, [0] * accepted.num_choices, request.output, cut, context):
            yield inference_pb2.GenerateResponse(event=event)

    def Multiplex(  # noqa: N802
        self, requests: Iterator[inference_pb2.MultiplexRequest], context: Any
    ) -> Iterator[inference_pb2.MultiplexResponse]:
        """This one is older than that: clients give each stream a call of its own."""
        context.abort(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")
        yield inference_pb2.MultiplexResponse()

    def Attach(self, request: inference_pb2.AttachRequest, context: Any) -> Iterator[inference_pb2.AttachResponse]:  # noqa: N802
        starts = list(request.next_indexes) or [request.next_index]
        self._begin(f"Attach {' '.join(map(str, starts))}", context)
        found = self._find(request.request_id, context)
        if len(starts) != found.num_choices:
            starts *= found.num_choices
        for event in self._events(found, starts, request.output, self._next_cut(), context):
            yield inference_pb2.AttachResponse(event=event)

    def Submit(self, request: inference_pb2.SubmitRequest, context: Any) -> inference_pb2.SubmitResponse:  # noqa: N802
        self._begin("Submit", context)
        accepted, joined = self._accept(request.request, context)
        return inference_pb2.SubmitResponse(request_id=accepted.info.request_id, prompt_tokens=3, joined=joined)

    def GetRequest(self, request: Any, context: Any) -> Any:  # noqa: N802
        """Of both services: they differ in the response alone."""
        self._begin("GetRequest", context)
        found = self._find(request.request_id, context)
        if isinstance(request, admin_pb2.GetRequestRequest):
            first = admin_pb2.Transition(to_state=types_pb2.REQUEST_STATE_WAITING, reason="submitted")
            second = admin_pb2.Transition(
                from_state=types_pb2.REQUEST_STATE_WAITING, to_state=types_pb2.REQUEST_STATE_PREFILL, reason="admitted"
            )
            first.at.FromDatetime(STARTED_AT)
            second.at.FromDatetime(STARTED_AT)
            return admin_pb2.GetRequestResponse(request=found.info, transitions=[first, second])
        count = found.info.usage.output_tokens if request.include_output else 0
        ids = [token(request.request_id, index) for index in range(count)]
        response = inference_pb2.GetRequestResponse(
            request=found.info, output_token_ids=ids, output_text=whole_text(request.request_id, count)
        )
        for choice in range(found.num_choices if found.num_choices > 1 else 0):
            name = choice_name(request.request_id, choice)
            made = found.spec.sampling.max_tokens if request.include_output else 0
            part = response.choices.add(choice=choice, request=found.info, output_text=whole_text(name, made))
            part.request.request_id = name
        return response

    def Cancel(self, request: inference_pb2.CancelRequest, context: Any) -> inference_pb2.CancelResponse:  # noqa: N802
        self._begin("Cancel", context)
        found = self._find(request.request_id, context)
        already_ended = not self._cancel(found)
        return inference_pb2.CancelResponse(state=found.info.state, already_ended=already_ended)

    def Tokenize(self, request: inference_pb2.TokenizeRequest, context: Any) -> inference_pb2.TokenizeResponse:  # noqa: N802
        self._begin("Tokenize", context)
        return inference_pb2.TokenizeResponse(token_ids=[ord(letter) for letter in request.prompt.text], max_model_len=2048)

    def ListModels(self, request: Any, context: Any) -> inference_pb2.ListModelsResponse:  # noqa: N802
        self._begin("ListModels", context)
        model = inference_pb2.Model(name="oracle", max_model_len=2048, vocab_size=50_000, tokenizer_digest="ab" * 32, executors=1)
        return inference_pb2.ListModelsResponse(models=[model])

    # ---- admin -----------------------------------------------------------------------------------------------------------------

    def ListRequests(self, request: admin_pb2.ListRequestsRequest, context: Any) -> admin_pb2.ListRequestsResponse:  # noqa: N802
        self._begin("ListRequests", context)
        matching = self._matching(request.filter)
        if not request.oldest_first:
            matching.reverse()
        if request.by_priority:
            matching.sort(key=lambda found: -found.info.priority)
        start = int(request.page_token or 0)
        end = start + request.page_size
        page_token = str(end) if end < len(matching) else ""
        return admin_pb2.ListRequestsResponse(requests=[found.info for found in matching[start:end]], next_page_token=page_token)

    def CancelRequests(self, request: admin_pb2.CancelRequestsRequest, context: Any) -> admin_pb2.CancelRequestsResponse:  # noqa: N802
        self._begin("CancelRequests dry" if request.dry_run else "CancelRequests", context)
        ids = list(request.request_ids) or [found.info.request_id for found in self._matching(request.filter)]
        return admin_pb2.CancelRequestsResponse(outcomes=[self._outcome(request_id, request.dry_run) for request_id in ids])

    def UpdateRequest(self, request: admin_pb2.UpdateRequestRequest, context: Any) -> admin_pb2.UpdateRequestResponse:  # noqa: N802
        self._begin("UpdateRequest", context)
        found = self._find(request.request_id, context)
        if found.info.state in ENDED:
            self._abort(context, grpc.StatusCode.FAILED_PRECONDITION, f"Request {request.request_id} has ended.")
        if request.HasField("priority"):
            found.info.priority = request.priority
        if request.HasField("deadline"):
            found.info.deadline.CopyFrom(request.deadline)
        self._act("update", request.request_id, request.reason)
        return admin_pb2.UpdateRequestResponse(request=found.info)

    def RetryRequest(self, request: admin_pb2.RetryRequestRequest, context: Any) -> admin_pb2.RetryRequestResponse:  # noqa: N802
        self._begin("RetryRequest", context)
        found = self._find(request.request_id, context)
        if found.info.state != types_pb2.REQUEST_STATE_FAILED:
            self._abort(context, grpc.StatusCode.FAILED_PRECONDITION, f"Request {request.request_id} has not failed.")
        self._act("retry", request.request_id, request.reason)
        return admin_pb2.RetryRequestResponse(request_id=f"{request.request_id}-again")

    def PauseQueue(self, request: admin_pb2.PauseQueueRequest, context: Any) -> admin_pb2.PauseQueueResponse:  # noqa: N802
        self._begin("PauseQueue", context)
        unchanged, self.paused = bool(self.paused), self.paused or f"by ann: {request.reason}"
        self._act("pause_queue", "", request.reason)
        return admin_pb2.PauseQueueResponse(unchanged=unchanged)

    def ResumeQueue(self, request: admin_pb2.ResumeQueueRequest, context: Any) -> admin_pb2.ResumeQueueResponse:  # noqa: N802
        self._begin("ResumeQueue", context)
        unchanged, self.paused = not self.paused, ""
        return admin_pb2.ResumeQueueResponse(unchanged=unchanged)

    def GetPolicy(self, request: admin_pb2.GetPolicyRequest, context: Any) -> admin_pb2.GetPolicyResponse:  # noqa: N802
        self._begin("GetPolicy", context)
        return self.policy

    def SetPolicy(self, request: admin_pb2.SetPolicyRequest, context: Any) -> admin_pb2.SetPolicyResponse:  # noqa: N802
        self._begin("SetPolicy", context)
        policy = admin_pb2.Policy()
        policy.CopyFrom(self.policy.policy)
        policy.policy = request.policy or policy.policy
        if request.HasField("fair_share"):
            policy.fair_share = request.fair_share
        if request.HasField("lane_shares"):
            policy.lane_shares.MergeFrom(request.lane_shares)
        unchanged = policy == self.policy.policy
        self.policy = admin_pb2.GetPolicyResponse(policy=policy, reason=f"by ann: {request.reason}")
        self._act("set_policy", "*policy*", request.reason)
        return admin_pb2.SetPolicyResponse(policy=policy, unchanged=unchanged)

    def ResetPolicy(self, request: admin_pb2.ResetPolicyRequest, context: Any) -> admin_pb2.ResetPolicyResponse:  # noqa: N802
        self._begin("ResetPolicy", context)
        unchanged, self.policy.reason = not self.policy.reason, ""
        return admin_pb2.ResetPolicyResponse(policy=self.policy.policy, unchanged=unchanged)

    def DrainExecutor(self, request: admin_pb2.DrainExecutorRequest, context: Any) -> admin_pb2.DrainExecutorResponse:  # noqa: N802
        self._begin(f"DrainExecutor {request.name}", context)
        self._act("drain_executor", request.name, request.reason)
        return admin_pb2.DrainExecutorResponse(executor=admin_pb2.Executor(name=request.name, draining=True))

    def UndrainExecutor(  # noqa: N802
        self, request: admin_pb2.UndrainExecutorRequest, context: Any
    ) -> admin_pb2.UndrainExecutorResponse:
        self._begin(f"UndrainExecutor {request.name}", context)
        return admin_pb2.UndrainExecutorResponse(executor=admin_pb2.Executor(name=request.name))

    def ListActions(self, request: admin_pb2.ListActionsRequest, context: Any) -> admin_pb2.ListActionsResponse:  # noqa: N802
        self._begin("ListActions", context)
        found = [action for action in reversed(self.actions) if request.target in ("", action.target)]
        start = int(request.page_token or 0)
        end = start + request.page_size
        return admin_pb2.ListActionsResponse(actions=found[start:end], next_page_token=str(end) if end < len(found) else "")

    def ListExecutors(self, request: Any, context: Any) -> admin_pb2.ListExecutorsResponse:  # noqa: N802
        self._begin("ListExecutors", context)
        executor = admin_pb2.Executor(
            name="executor-0", address="unix:/run/x", model="oracle", connected=True, epoch=3, device="simulated", block_size=16,
            total_blocks=64, free_blocks=60, held_blocks=4, running=1, steps=12, idle_share=0.25,
        )  # fmt: skip
        executor.joined_at.FromDatetime(STARTED_AT)
        return admin_pb2.ListExecutorsResponse(executors=[executor])

    def GetLoad(self, request: Any, context: Any) -> admin_pb2.GetLoadResponse:  # noqa: N802
        self._begin("GetLoad", context)
        return admin_pb2.GetLoadResponse(
            num_requests_running=1,
            max_num_seqs=8,
            batch_occupancy=0.5,
            batching="continuous",
            policy="fcfs",
            steps=12,
            queue_paused=bool(self.paused),
            queue_pause_reason=self.paused,
        )

    # ---- inside ----------------------------------------------------------------------------------------------------------------

    def _check_health(self, request: bytes, context: Any) -> bytes:
        known = request in (b"\x0a\x27tokenmill.inference.v1.InferenceService", b"\x0a\x00")
        return b"\x08\x01" if self.serving and known else b"\x08\x02"

    def _begin(self, call: str, context: Any) -> None:
        self.calls.append(call)
        self.tokens += [value for key, value in context.invocation_metadata() if key == "authorization"]
        self.called.set()
        if self.refusals:
            status = self.refusals.pop(0)
            context.set_trailing_metadata((("grpc-status-details-bin", status.SerializeToString()),))
            code = next(code for code in grpc.StatusCode if code.value[0] == status.code)
            self._abort(context, code, status.message)

    @staticmethod
    def _abort(context: Any, code: grpc.StatusCode, message: str) -> NoReturn:
        context.abort(code, message)
        raise AssertionError("abort raises")

    def _act(self, verb: str, target: str, reason: str) -> None:
        action = admin_pb2.Action(actor="ann", verb=verb, target=target, reason=reason, detail="detail")
        action.at.FromDatetime(STARTED_AT)
        self.actions.append(action)

    def _next_cut(self) -> int | None:
        return self.cuts.pop(0) if self.cuts else None

    def _accept(self, spec: inference_pb2.RequestSpec, context: Any) -> tuple[FakeRequest, bool]:
        known = self.requests.get(spec.request_id)
        if known is not None:
            if known.spec != spec:
                self._abort(context, grpc.StatusCode.ALREADY_EXISTS, f"Request {spec.request_id} exists with another payload.")
            return known, True
        info = types_pb2.RequestInfo(
            request_id=spec.request_id, model="oracle", tenant=spec.tenant or "default", state=types_pb2.REQUEST_STATE_DECODE,
            lane=spec.lane, priority=spec.priority, detached=spec.detached, executor="executor-0",
            usage=types_pb2.TokenCounts(prompt_tokens=3),
        )  # fmt: skip
        info.submitted_at.FromDatetime(STARTED_AT)
        return self.requests.setdefault(spec.request_id, FakeRequest(spec, info)), False

    def _find(self, request_id: str, context: Any) -> FakeRequest:
        if request_id not in self.requests:
            self._abort(context, grpc.StatusCode.NOT_FOUND, f"No request has the id {request_id}.")
        return self.requests[request_id]

    def _events(
        self, request: FakeRequest, starts: list[int], output: inference_pb2.OutputOptions, cut: int | None, context: Any
    ) -> Iterator[types_pb2.StreamEvent]:
        several = len(starts) > 1
        events = self._choices(request, starts, context) if several else self._whole_stream(request, starts[0], context)
        for sent, event in enumerate(events):
            if sent == cut:
                self._abort(context, grpc.StatusCode.UNAVAILABLE, "cut")
            if event.HasField("delta"):
                for name in ("text", "token_ids"):
                    if not getattr(output, name):
                        event.delta.ClearField(name)
            yield event

    def _choices(self, request: FakeRequest, starts: list[int], context: Any) -> Iterator[types_pb2.StreamEvent]:
        """Choice i is streamed as the request "id/i" would be, an event of each in turn; choice i makes i tokens fewer."""
        request_id = request.info.request_id
        accepted = types_pb2.StreamEvent.Accepted(request_id=request_id, prompt_tokens=3, num_choices=len(starts))
        yield types_pb2.StreamEvent(accepted=accepted)
        for turn in zip_longest(*(self._choice(request, choice, start) for choice, start in enumerate(starts))):
            yield from (event for event in turn if event is not None)

    def _choice(self, request: FakeRequest, choice: int, start: int) -> Iterator[types_pb2.StreamEvent]:
        name = choice_name(request.info.request_id, choice)
        count = request.max_tokens - choice
        for index in range(start, count):
            yield _delta(index, 1, [token(name, index)], text_of(name, index, index + 1), choice)
        yield _delta(count, 0, [], tail_of(name, count), choice)
        finished = self._finish(request, count)
        if choice in self.failing_choices:
            finished.state, finished.error = types_pb2.REQUEST_STATE_FAILED, "it broke"
        yield types_pb2.StreamEvent(finished=finished, choice=choice)

    def _whole_stream(self, request: FakeRequest, start: int, context: Any) -> Iterator[types_pb2.StreamEvent]:
        request_id = request.info.request_id
        yield types_pb2.StreamEvent(accepted=types_pb2.StreamEvent.Accepted(request_id=request_id, prompt_tokens=3))
        count = start
        for index in range(start, request.max_tokens):
            while index == self.hold_at and context.is_active() and not request.ended.wait(0.01):
                pass
            if request.ended.is_set() and request.info.state != types_pb2.REQUEST_STATE_DONE:
                break
            yield _delta(index, 1, [token(request_id, index)], text_of(request_id, index, index + 1))
            count = index + 1
            request.info.usage.output_tokens = max(request.info.usage.output_tokens, count)
        yield _delta(count, 0, [], tail_of(request_id, count))
        yield types_pb2.StreamEvent(finished=self._finish(request, count))

    @staticmethod
    def _finish(request: FakeRequest, count: int) -> types_pb2.StreamEvent.Finished:
        if request.info.state not in ENDED:
            request.info.state = types_pb2.REQUEST_STATE_DONE
            request.info.finish_reason = types_pb2.FINISH_REASON_LENGTH
        return types_pb2.StreamEvent.Finished(
            state=request.info.state,
            finish_reason=request.info.finish_reason,
            usage=types_pb2.TokenCounts(prompt_tokens=3, output_tokens=count),
            error=request.info.error,
        )

    def _cancel(self, request: FakeRequest) -> bool:
        if request.info.state in ENDED:
            return False
        request.info.state = types_pb2.REQUEST_STATE_CANCELLED
        request.info.finish_reason = types_pb2.FINISH_REASON_CANCELLED
        request.ended.set()
        return True

    def _outcome(self, request_id: str, dry_run: bool) -> admin_pb2.CancelRequestsResponse.Outcome:
        found = self.requests.get(request_id)
        if found is None:
            return admin_pb2.CancelRequestsResponse.Outcome(request_id=request_id, not_found=True)
        ended = found.info.state in ENDED if dry_run else not self._cancel(found)
        return admin_pb2.CancelRequestsResponse.Outcome(request_id=request_id, state=found.info.state, already_ended=ended)

    def _matching(self, condition: admin_pb2.RequestFilter) -> list[FakeRequest]:
        return [
            found
            for found in self.requests.values()
            if (not condition.states or found.info.state in condition.states)
            and (not condition.tenant or found.info.tenant == condition.tenant)
            and (not condition.HasField("min_priority") or found.info.priority >= condition.min_priority)
            and (not condition.HasField("max_priority") or found.info.priority <= condition.max_priority)
            and (not condition.lanes or (found.info.lane or types_pb2.LANE_STANDARD) in condition.lanes)
            and (not condition.HasField("min_age") or condition.min_age.seconds < 3_600)
        ]


def choice_name(request_id: str, choice: int) -> str:
    return f"{request_id}/{choice}" if choice else request_id


def _delta(first_index: int, count: int, token_ids: list[int], text: str, choice: int = 0) -> types_pb2.StreamEvent:
    delta = types_pb2.StreamEvent.Delta(first_index=first_index, token_count=count, token_ids=token_ids, text=text)
    return types_pb2.StreamEvent(delta=delta, choice=choice)


def queue_full(retry_delay_s: float) -> error_details_pb2.RetryInfo:
    info = error_details_pb2.RetryInfo()
    info.retry_delay.FromNanoseconds(round(retry_delay_s * 1e9))
    return info


def bad_request(*violations: tuple[str, str]) -> error_details_pb2.BadRequest:
    message = error_details_pb2.BadRequest()
    for name, description in violations:
        message.field_violations.add(field=name, description=description)
    return message
