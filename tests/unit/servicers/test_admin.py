"""What operators see and do."""

from __future__ import annotations

from typing import Any

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp
from tokenmill.admin.v1 import admin_pb2 as admin
from tokenmill.inference.v1 import inference_pb2 as pb
from tokenmill.inference.v1 import types_pb2 as types
from tokenmill_scheduler.core.request import State
from tokenmill_scheduler.servicers import bulk_cancel

from tests.unit.servicers.calls import refusal, spec, violations
from tests.unit.servicers.conftest import Served


async def submit(served: Served, count: int, **fields: Any) -> list[str]:
    ids = [f"r{len(served.desk.entries) + i}" for i in range(count)]
    for request_id in ids:
        await served.inference.Submit(pb.SubmitRequest(request=spec(request_id=request_id, **fields)))
    return ids


async def test_requests_come_in_pages_newest_first_unless_asked(served: Served) -> None:
    ids = await submit(served, 7)
    listed, token = [], ""
    while True:
        page = await served.admin.ListRequests(admin.ListRequestsRequest(page_size=3, page_token=token))
        listed += [info.request_id for info in page.requests]
        token = page.next_page_token
        if not token:
            break
    assert listed == ids[::-1]
    page = await served.admin.ListRequests(admin.ListRequestsRequest(oldest_first=True))
    assert [info.request_id for info in page.requests] == ids


async def test_a_waiting_request_says_why_and_an_ended_one_when(served: Served) -> None:
    await submit(served, 2)
    served.desk.produce("r1", 8)
    ended, waiting = (await served.admin.ListRequests(admin.ListRequestsRequest())).requests
    assert (waiting.state, waiting.wait_reason) == (types.REQUEST_STATE_WAITING, "no free sequence")
    assert waiting.wait_code == "no_slot"
    assert not waiting.HasField("finished_at")
    assert (ended.state, ended.wait_reason) == (types.REQUEST_STATE_DONE, "")
    assert ended.finish_reason == types.FINISH_REASON_LENGTH
    assert ended.finished_at.seconds > 0
    assert (ended.usage.prompt_tokens, ended.usage.output_tokens) == (3, 8)


async def test_filters_hold_together(served: Served) -> None:
    await submit(served, 2, priority=5)
    await submit(served, 2, priority=9, tenant="t")
    served.desk.produce("r3", 8)
    waiting = admin.RequestFilter(states=[types.REQUEST_STATE_WAITING], tenant="t", min_priority=6, max_priority=9)
    page = await served.admin.ListRequests(admin.ListRequestsRequest(filter=waiting))
    assert [info.request_id for info in page.requests] == ["r2"]


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (admin.ListRequestsRequest(page_size=-1), "page_size"),
        (admin.ListRequestsRequest(page_size=1001), "page_size"),
        (admin.ListRequestsRequest(page_token="nonsense"), "page_token"),
        (admin.ListRequestsRequest(filter=admin.RequestFilter(states=[types.REQUEST_STATE_UNSPECIFIED])), "filter.states[0]"),
        (admin.ListRequestsRequest(filter=admin.RequestFilter(tenant="a\0")), "filter.tenant"),
        (admin.ListRequestsRequest(filter=admin.RequestFilter(model="a\0")), "filter.model"),
        (admin.ListRequestsRequest(filter=admin.RequestFilter(lanes=[types.Lane.ValueType(9)])), "filter.lanes[0]"),
        (admin.ListRequestsRequest(filter=admin.RequestFilter(min_age=Duration(seconds=-1))), "filter.min_age"),
    ],
)
async def test_lists_refuse_what_makes_no_sense(served: Served, request_: admin.ListRequestsRequest, field: str) -> None:
    assert list(violations(await refusal(served.admin.ListRequests(request_)))) == [field]


async def test_a_request_tells_its_life(served: Served) -> None:
    await submit(served, 1)
    served.desk.produce("r0", 8)
    answer = await served.admin.GetRequest(admin.GetRequestRequest(request_id="r0"))
    moves = [(move.from_state, move.to_state) for move in answer.transitions]
    assert moves == [
        (types.REQUEST_STATE_UNSPECIFIED, types.REQUEST_STATE_WAITING),
        (types.REQUEST_STATE_WAITING, types.REQUEST_STATE_PREFILL),
        (types.REQUEST_STATE_PREFILL, types.REQUEST_STATE_DECODE),
        (types.REQUEST_STATE_DECODE, types.REQUEST_STATE_DONE),
    ]
    assert answer.request.request_id == "r0"
    missing = await refusal(served.admin.GetRequest(admin.GetRequestRequest(request_id="nobody")))
    assert missing.code() is grpc.StatusCode.NOT_FOUND


async def test_c03_cancel_a_finished_request_twice(served: Served) -> None:
    await submit(served, 1)
    served.desk.produce("r0", 8)
    before = served.desk.entries["r0"].transitions.copy()
    for _ in range(2):
        answer = await served.inference.Cancel(pb.CancelRequest(request_id="r0"))
        assert (answer.state, answer.already_ended) == (types.REQUEST_STATE_DONE, True)
        outcome = (await served.admin.CancelRequests(admin.CancelRequestsRequest(request_ids=["r0"]))).outcomes[0]
        assert (outcome.state, outcome.already_ended) == (types.REQUEST_STATE_DONE, True)
    assert served.desk.entries["r0"].transitions == before


async def test_cancel_by_ids_answers_for_each(served: Served) -> None:
    await submit(served, 2)
    request = admin.CancelRequestsRequest(request_ids=["r1", "nobody", "r1", "r0"], reason="maintenance")
    outcomes = (await served.admin.CancelRequests(request)).outcomes
    assert [outcome.request_id for outcome in outcomes] == ["r1", "nobody", "r0"]
    assert [outcome.not_found for outcome in outcomes] == [False, True, False]
    info = (await served.admin.GetRequest(admin.GetRequestRequest(request_id="r0"))).request
    assert (info.state, info.error) == (types.REQUEST_STATE_CANCELLED, "maintenance")


async def test_c68_cancel_by_filter_goes_through_all_pages_and_spares_the_ended(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bulk_cancel, "MAX_PAGE_SIZE", 3)
    monkeypatch.setattr(bulk_cancel, "_CONCURRENT_CANCELS", 2)
    await submit(served, 8, tenant="t")
    await submit(served, 1)
    served.desk.produce("r0", 8)
    request = admin.CancelRequestsRequest(filter=admin.RequestFilter(tenant="t"), dry_run=True)
    preview = (await served.admin.CancelRequests(request)).outcomes
    assert {outcome.state for outcome in preview} == {types.REQUEST_STATE_WAITING}
    assert all(served.desk.entries[f"r{i}"].state is State.WAITING for i in range(1, 9))
    request.dry_run = False
    outcomes = (await served.admin.CancelRequests(request)).outcomes
    assert (
        [outcome.request_id for outcome in outcomes]
        == [outcome.request_id for outcome in preview]
        == [f"r{i}" for i in range(1, 8)]
    )
    assert all(served.desk.entries[f"r{i}"].state is State.CANCELLED for i in range(1, 8))
    assert served.desk.entries["r0"].state is State.DONE
    assert served.desk.entries["r8"].state is State.WAITING


async def test_cancel_refuses_no_condition_and_too_many_matches(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    await submit(served, 3)
    assert list(violations(await refusal(served.admin.CancelRequests(admin.CancelRequestsRequest())))) == ["filter"]
    monkeypatch.setattr(bulk_cancel, "MAX_CANCELLED_MATCHES", 2)
    request = admin.CancelRequestsRequest(filter=admin.RequestFilter(min_priority=0))
    assert "nothing was cancelled" in violations(await refusal(served.admin.CancelRequests(request)))["filter"]
    too_many = admin.CancelRequestsRequest(request_ids=[str(i) for i in range(1001)])
    assert list(violations(await refusal(served.admin.CancelRequests(too_many)))) == ["request_ids"]
    too_long = admin.CancelRequestsRequest(request_ids=["r0"], reason="x" * 1001)
    assert list(violations(await refusal(served.admin.CancelRequests(too_long)))) == ["reason"]
    assert all(entry.state is State.WAITING for entry in served.desk.entries.values())


async def test_update_changes_what_is_given_and_leaves_the_rest(served: Served) -> None:
    await submit(served, 1, priority=3)
    deadline = Timestamp(seconds=1_800_000_000, nanos=500_000_000)
    answer = await served.admin.UpdateRequest(admin.UpdateRequestRequest(request_id="r0", deadline=deadline))
    assert (answer.request.priority, answer.request.deadline) == (3, deadline)
    answer = await served.admin.UpdateRequest(admin.UpdateRequestRequest(request_id="r0", priority=0))
    assert (answer.request.priority, answer.request.deadline) == (0, deadline)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({}, "priority"),
        ({"priority": 1001}, "priority"),
        ({"deadline": Timestamp(seconds=-1)}, "deadline"),
        ({"deadline": Timestamp(seconds=2**40)}, "deadline"),
    ],
)
async def test_update_refuses_what_makes_no_sense(served: Served, fields: dict[str, object], field: str) -> None:
    await submit(served, 1)
    request = admin.UpdateRequestRequest(request_id="r0", **fields)  # type: ignore[arg-type]
    assert list(violations(await refusal(served.admin.UpdateRequest(request)))) == [field]


async def test_update_of_an_ended_request_fails(served: Served) -> None:
    await submit(served, 1)
    served.desk.produce("r0", 8)
    error = await refusal(served.admin.UpdateRequest(admin.UpdateRequestRequest(request_id="r0", priority=1)))
    assert error.code() is grpc.StatusCode.FAILED_PRECONDITION


async def test_executors_load_and_models(served: Served) -> None:
    executor = (await served.admin.ListExecutors(admin.ListExecutorsRequest())).executors[0]
    assert (executor.total_blocks, executor.free_blocks, executor.cached_blocks, executor.held_blocks) == (10, 5, 2, 3)
    assert executor.joined_at == Timestamp(seconds=1_700_000_000, nanos=500_000_000)
    load = await served.admin.GetLoad(admin.GetLoadRequest())
    gauges = [1, 2, 8, 512, 0.25, 0.75, 3, 40, 50, 60, 4, 5, 6, "continuous", "fcfs", 70, 20]
    assert [value for _, value in load.ListFields()] == gauges
    model = (await served.inference.ListModels(pb.ListModelsRequest())).models[0]
    assert (model.name, model.has_chat_template, model.executors) == ("tiny", True, 1)


async def test_lists_by_lane_age_and_priority(served: Served) -> None:
    await submit(served, 1, priority=1, lane=types.LANE_BATCH)
    await submit(served, 1, priority=7, lane=types.LANE_REAL_TIME)
    await submit(served, 1, priority=5)

    async def listed(**fields: Any) -> list[str]:
        page = await served.admin.ListRequests(admin.ListRequestsRequest(**fields))
        return [info.request_id for info in page.requests]

    assert await listed(by_priority=True) == ["r1", "r2", "r0"]
    lanes = [types.LANE_BATCH, types.LANE_STANDARD]
    assert await listed(filter=admin.RequestFilter(lanes=lanes)) == ["r2", "r0"]
    assert await listed(filter=admin.RequestFilter(lanes=[types.LANE_UNSPECIFIED])) == ["r2"]
    assert await listed(filter=admin.RequestFilter(min_age=Duration(seconds=3600))) == []
    assert await listed(filter=admin.RequestFilter(min_age=Duration())) == ["r2", "r1", "r0"]
    info = (await served.admin.GetRequest(admin.GetRequestRequest(request_id="r0"))).request
    assert info.lane == types.LANE_BATCH


async def test_changes_are_the_operators_with_their_reason(served: Served) -> None:
    await submit(served, 1)
    await served.admin.UpdateRequest(admin.UpdateRequestRequest(request_id="r0", priority=1, reason="important"))
    await served.inference.Cancel(pb.CancelRequest(request_id="r0"))
    await submit(served, 1)
    await served.admin.CancelRequests(admin.CancelRequestsRequest(request_ids=["r1"], reason="not needed"))
    assert served.desk.changes == [
        ("update", "r0", "important", "anonymous"),
        ("cancel", "r0", "cancelled by the client", ""),
        ("cancel", "r1", "not needed", "anonymous"),
    ]


async def test_only_a_failed_request_is_tried_again(served: Served) -> None:
    await submit(served, 1)
    retry = admin.RetryRequestRequest(request_id="r0", reason="mended")
    assert (await refusal(served.admin.RetryRequest(retry))).code() is grpc.StatusCode.FAILED_PRECONDITION
    served.desk.end("r0", State.FAILED, "broken")
    new_id = (await served.admin.RetryRequest(retry)).request_id
    info = (await served.admin.GetRequest(admin.GetRequestRequest(request_id=new_id))).request
    assert (info.retry_of, info.state) == ("r0", types.REQUEST_STATE_WAITING)
    assert new_id.startswith("req-")
    assert served.desk.changes == [("retry", "r0", "mended", "anonymous")]
    missing = await refusal(served.admin.RetryRequest(admin.RetryRequestRequest(request_id="nobody")))
    assert missing.code() is grpc.StatusCode.NOT_FOUND


async def test_pause_and_resume_say_whether_they_changed_anything(served: Served) -> None:
    pause = admin.PauseQueueRequest(reason="new model")
    assert [(await served.admin.PauseQueue(pause)).unchanged for _ in range(2)] == [False, True]
    assert [(await served.admin.ResumeQueue(admin.ResumeQueueRequest())).unchanged for _ in range(2)] == [False, True]


async def test_the_policy_is_shown_set_in_parts_and_reset(served: Served) -> None:
    before = await served.admin.GetPolicy(admin.GetPolicyRequest())
    assert (before.policy.policy, before.policy.fair_share, before.reason) == ("fcfs", False, "")
    assert [(await served.admin.SetPolicy(admin.SetPolicyRequest(policy="sjf"))).unchanged for _ in range(2)] == [False, True]
    assert (await served.admin.SetPolicy(admin.SetPolicyRequest(fair_share=True))).policy.policy == "sjf"
    after = await served.admin.SetPolicy(admin.SetPolicyRequest(lane_shares=admin.LaneShares(standard=0, batch=50)))
    shares = admin.LaneShares(real_time=50, standard=0, batch=50)
    assert after.policy == admin.Policy(policy="sjf", fair_share=True, lane_shares=shares)
    assert (await served.admin.GetPolicy(admin.GetPolicyRequest())).reason == "by anonymous"
    assert [(await served.admin.ResetPolicy(admin.ResetPolicyRequest())).unchanged for _ in range(2)] == [False, True]
    assert (await served.admin.GetPolicy(admin.GetPolicyRequest())).policy == before.policy


async def test_a_policy_nobody_knows_and_more_than_all_slots_are_refused(served: Served) -> None:
    # With the 40 and 10 of the other lanes.
    refused = await refusal(
        served.admin.SetPolicy(admin.SetPolicyRequest(policy="best", lane_shares=admin.LaneShares(real_time=51)))
    )
    assert list(violations(refused)) == ["policy", "lane_shares"]
    assert violations(refused)["lane_shares"] == "must come to 100 per cent at most, not real_time=51,standard=40,batch=10"


async def test_drain_and_undrain_an_executor(served: Served) -> None:
    answer = await served.admin.DrainExecutor(admin.DrainExecutorRequest(name="x2", reason="new driver"))
    assert (answer.executor.name, answer.executor.draining) == ("x2", True)
    assert not (await served.admin.UndrainExecutor(admin.UndrainExecutorRequest(name="x2"))).executor.draining
    for call in (
        served.admin.DrainExecutor(admin.DrainExecutorRequest(name="nobody")),
        served.admin.UndrainExecutor(admin.UndrainExecutorRequest(name="nobody")),
    ):
        assert (await refusal(call)).code() is grpc.StatusCode.NOT_FOUND


async def test_actions_are_listed_page_by_page(served: Served) -> None:
    for number in range(5):
        await served.admin.DrainExecutor(admin.DrainExecutorRequest(name=f"x{1 + number % 2}", reason=f"no. {number}"))
    reasons: list[str] = []
    token = ""
    while not reasons or token:
        page = await served.admin.ListActions(admin.ListActionsRequest(page_size=2, page_token=token))
        reasons += [action.reason for action in page.actions]
        token = page.next_page_token
    assert reasons == [f"no. {number}" for number in (4, 3, 2, 1, 0)]
    (first, _) = (await served.admin.ListActions(admin.ListActionsRequest(target="x2"))).actions
    assert (first.actor, first.verb, first.target, first.at.seconds) == ("anonymous", "drain_executor", "x2", 1_700_000_003)
    for bad, field in (({"page_size": -1}, "page_size"), ({"page_token": "x"}, "page_token"), ({"target": "\0"}, "target")):
        request = admin.ListActionsRequest(**bad)
        assert list(violations(await refusal(served.admin.ListActions(request)))) == [field]
