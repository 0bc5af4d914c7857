"""Requests for several choices at the door and in their streams: refused by field, mixed, attached, ranked, left."""

from __future__ import annotations

import asyncio

import grpc
import pytest
from tokenmill.admin.v1 import admin_pb2
from tokenmill.inference.v1 import inference_pb2 as pb
from tokenmill.inference.v1 import types_pb2 as types
from tokenmill.inference.v1.types_pb2 import SamplingParams, StreamEvent
from tokenmill_scheduler.core.plans import TokenLogprobs
from tokenmill_scheduler.core.request import Request, State
from tokenmill_scheduler.ranking import Candidate, best

from tests.fakes.desk import FakeDesk, oracle_token
from tests.unit.servicers.calls import both, events, next_event, refusal, spec, violations
from tests.unit.servicers.conftest import Served, served_model

STOP = 150


@pytest.fixture(params=[False, True], ids=["calls of their own", "one call"])
def multiplexed(request: pytest.FixtureRequest) -> bool:
    """Streams are the same either way."""
    return bool(request.param)


def choices(n: int, best_of: int | None = None, max_tokens: int = 8, **fields: object) -> pb.GenerateRequest:
    sampling = SamplingParams(max_tokens=max_tokens, n=n, best_of=best_of, stop_token_ids=[STOP], seed=3, **fields)  # type: ignore[arg-type]
    return pb.GenerateRequest(request=spec(sampling=sampling, request_id="a"), output=both())


def tokens(stream: list[StreamEvent]) -> dict[int, list[int]]:
    """By choice; raises unless each choice's indexes are 0, 1, … in order."""
    found: dict[int, list[int]] = {}
    for event in stream:
        if event.HasField("delta"):
            assert event.delta.first_index == len(found.setdefault(event.choice, []))
            found[event.choice] += event.delta.token_ids
    return found


def ends(stream: list[StreamEvent]) -> list[tuple[int, int]]:
    """(choice, output tokens) of each end, in the order of their coming."""
    return [(event.choice, event.finished.usage.output_tokens) for event in stream if event.HasField("finished")]


def said(desk: FakeDesk, request_id: str, count: int) -> list[int]:
    return [oracle_token(desk.entries[request_id].request, index) for index in range(count)]


def ending_after(desk: FakeDesk, *lengths: int) -> None:
    """Choice i ends by a stop token as its `lengths[i]`-th."""

    def oracle(request: Request, index: int) -> int:
        return STOP if index + 1 == lengths[request.choice] else oracle_token(request, index)

    desk.oracle = oracle


# ---- at the door ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "at_fault"),
    [
        ({"n": 0}, "n"),
        ({"n": 17}, "n"),
        ({"n": -1}, "n"),
        ({"best_of": 0}, "best_of"),
        ({"best_of": 17}, "best_of"),
        ({"n": 3, "best_of": 2}, "best_of"),
    ],
)
async def test_c49_numbers_of_choices_outside_their_range(served: Served, fields: dict[str, int], at_fault: str) -> None:
    call = served.inference.Submit(pb.SubmitRequest(request=spec(sampling=SamplingParams(**fields))))  # type: ignore[arg-type]
    assert list(violations(await refusal(call))) == [f"request.sampling.{at_fault}"]
    assert not served.desk.entries


@pytest.mark.parametrize(("n", "best_of", "field"), [(5, None, "n"), (2, 5, "best_of")])
async def test_more_choices_than_can_ever_run_at_once_are_refused(served: Served, n: int, best_of: int | None, field: str) -> None:
    served.desk.served = {"tiny": served_model(pool_tokens=400)}
    sampling = SamplingParams(n=n, best_of=best_of, max_tokens=2)
    found = violations(await refusal(served.inference.Submit(pb.SubmitRequest(request=spec(range(1, 100), sampling)))))
    assert found == {f"request.sampling.{field}": "no executor has room for more than 4 choices of this prompt at once; got 5"}


@pytest.mark.parametrize(("n", "best_of"), [(1, None), (16, None), (16, 16), (1, 16), (1, 1)])
async def test_numbers_of_choices_at_their_edges(served: Served, n: int, best_of: int | None) -> None:
    await served.inference.Submit(pb.SubmitRequest(request=spec(sampling=SamplingParams(n=n, best_of=best_of, max_tokens=2))))
    assert len(served.desk.entries) == max(n, best_of or 0)


@pytest.mark.parametrize("request_id", ["a/0", "a/", "a/b", "a/1/1", "/1", "a/100", "a/01"])
async def test_what_no_choice_can_be_called(served: Served, request_id: str) -> None:
    for call in (
        served.inference.GetRequest(pb.GetRequestRequest(request_id=request_id)),
        served.inference.Cancel(pb.CancelRequest(request_id=request_id)),
    ):
        assert list(violations(await refusal(call))) == ["request_id"]


async def test_a_client_cannot_give_a_choices_id(served: Served) -> None:
    call = served.inference.Submit(pb.SubmitRequest(request=spec(request_id="a/1")))
    assert list(violations(await refusal(call))) == ["request.request_id"]


# ---- streams -------------------------------------------------------------------------------------------------------------------


async def test_a_stream_is_accepted_once_mixes_deltas_and_ends_after_the_last_choice(served: Served) -> None:
    call = served.inference.Generate(choices(3))
    accepted = (await next_event(call)).accepted
    assert (accepted.request_id, accepted.prompt_tokens, accepted.num_choices) == ("a", 3, 3)
    served.desk.produce("a/2", 8)
    served.desk.produce("a", 3)
    served.desk.produce("a/1", 8)
    served.desk.produce("a", 5)
    stream = await events(call)
    assert tokens(stream) == {0: said(served.desk, "a", 8), 1: said(served.desk, "a/1", 8), 2: said(served.desk, "a/2", 8)}
    assert sorted(ends(stream)) == [(0, 8), (1, 8), (2, 8)]
    assert stream[-1].HasField("finished")
    assert served.desk.open_streams == 0


async def test_one_choice_is_streamed_by_its_own_id(served: Served) -> None:
    await served.inference.Submit(pb.SubmitRequest(request=choices(2).request))
    served.desk.produce("a/1", 8)
    stream = await events(served.inference.Attach(pb.AttachRequest(request_id="a/1", next_index=6, output=both())))
    assert (stream[0].accepted.request_id, stream[0].accepted.num_choices) == ("a/1", 1)
    assert [(event.choice, list(event.delta.token_ids)) for event in stream[1:-1]] == [(1, said(served.desk, "a/1", 8)[6:])]
    assert ends(stream) == [(1, 8)]


async def test_attaching_begins_where_it_is_told_to_for_each_choice(served: Served) -> None:
    await served.inference.Submit(pb.SubmitRequest(request=choices(2).request))
    for request_id in ("a", "a/1"):
        served.desk.produce(request_id, 8)
    request = pb.AttachRequest(request_id="a", next_indexes=[8, 5], output=both())
    stream = await events(served.inference.Attach(request))
    assert [(e.choice, e.delta.first_index, e.delta.token_count) for e in stream if e.HasField("delta")] == [(1, 5, 3)]
    assert sorted(ends(stream)) == [(0, 8), (1, 8)]


@pytest.mark.parametrize(("request_id", "next_indexes"), [("a", [1]), ("a", [0, 0, 0]), ("a/1", [0, 0])])
async def test_as_many_indexes_as_choices(served: Served, request_id: str, next_indexes: list[int]) -> None:
    await served.inference.Submit(pb.SubmitRequest(request=choices(2).request))
    call = served.inference.Attach(pb.AttachRequest(request_id=request_id, next_indexes=next_indexes))
    assert list(violations(await refusal(call.read()))) == ["next_indexes"]
    assert served.desk.open_streams == 0


async def test_an_index_that_one_choice_has_not_reached_attaches_to_none(served: Served) -> None:
    await served.inference.Submit(pb.SubmitRequest(request=choices(2).request))
    served.desk.produce("a", 4)
    error = await refusal(served.inference.Attach(pb.AttachRequest(request_id="a", next_indexes=[4, 1])).read())
    assert error.code() is grpc.StatusCode.OUT_OF_RANGE
    assert served.desk.open_streams == 0


async def test_c13_leaving_the_stream_leaves_every_choice(served: Served) -> None:
    call = served.inference.Generate(choices(3))
    await next_event(call)
    served.desk.produce("a/1", 8)
    await next_event(call)
    call.cancel()
    await served.desk.until(lambda: served.desk.open_streams == 0)
    states = [served.desk.entries[request_id].state for request_id in ("a", "a/1", "a/2")]
    assert states == [State.CANCELLED, State.DONE, State.CANCELLED]


async def test_a_stream_that_the_shutdown_ends_says_so(served: Served) -> None:
    call = served.inference.Generate(choices(2))
    await next_event(call)
    served.desk.shut_down()
    assert (await refusal(call.read())).code() is grpc.StatusCode.UNAVAILABLE


async def test_cancelling_the_request_cancels_all_its_choices_and_a_choices_own_id_it_alone(served: Served) -> None:
    await served.inference.Submit(pb.SubmitRequest(request=choices(3).request))
    await served.inference.Cancel(pb.CancelRequest(request_id="a/1"))
    assert served.desk.entries["a"].state is State.WAITING
    response = await served.inference.Cancel(pb.CancelRequest(request_id="a"))
    assert (response.state, response.already_ended) == (types.REQUEST_STATE_CANCELLED, False)
    assert (await served.inference.Cancel(pb.CancelRequest(request_id="a"))).already_ended


async def test_operators_see_every_choice_and_whose_it_is(served: Served) -> None:
    await served.inference.Submit(pb.SubmitRequest(request=choices(2).request))
    page = await served.admin.ListRequests(admin_pb2.ListRequestsRequest(oldest_first=True))
    assert [(r.request_id, r.n, r.choice, r.parent_id) for r in page.requests] == [("a", 2, 0, ""), ("a/1", 2, 1, "a")]


# ---- the best ------------------------------------------------------------------------------------------------------------------


async def test_the_best_are_told_when_all_have_ended_and_nothing_before(served: Served) -> None:
    """Oracle log probabilities sink with the index, so the shortest choice is the best."""
    ending_after(served.desk, 5, 8, 2, 3)
    call = served.inference.Generate(choices(2, best_of=4))
    assert (await next_event(call)).accepted.num_choices == 2
    for request_id in ("a", "a/1", "a/2"):
        served.desk.produce(request_id, 8)
    served.desk.produce("a/3", 2)
    reading = asyncio.ensure_future(next_event(call))
    await asyncio.sleep(0)
    assert not reading.done()
    served.desk.produce("a/3", 8)
    stream = [await reading, *await events(call)]
    assert ends(stream) == [(0, 2), (1, 3)]
    assert tokens(stream) == {0: served.desk.entries["a/2"].tokens, 1: served.desk.entries["a/3"].tokens}
    assert not any(event.delta.logprobs for event in stream if event.HasField("delta"))
    again = await events(served.inference.Attach(pb.AttachRequest(request_id="a", next_indexes=[1, 3], output=both())))
    assert [(e.choice, list(e.delta.token_ids)) for e in again if e.delta.token_count] == [
        (0, served.desk.entries["a/2"].tokens[1:])
    ]
    assert ends(again) == [(0, 2), (1, 3)]


async def test_log_probabilities_that_were_asked_for_come_with_the_best(served: Served) -> None:
    ending_after(served.desk, 4, 2)
    call = served.inference.Generate(choices(1, best_of=2, logprobs=1))
    await next_event(call)
    served.desk.produce("a", 8)
    served.desk.produce("a/1", 8)
    assert [len(event.delta.logprobs) for event in await events(call) if event.delta.token_count] == [2]


async def test_indexes_beyond_the_best_are_refused(served: Served) -> None:
    ending_after(served.desk, 4, 2)
    await served.inference.Submit(pb.SubmitRequest(request=choices(1, best_of=2).request))
    served.desk.produce("a", 8)
    served.desk.produce("a/1", 8)
    call = served.inference.Attach(pb.AttachRequest(request_id="a", next_indexes=[3]))
    await call.read()
    assert (await refusal(call.read())).code() is grpc.StatusCode.OUT_OF_RANGE


async def snapshot(served: Served, request_id: str, include_output: bool = True) -> pb.GetRequestResponse:
    return await served.inference.GetRequest(pb.GetRequestRequest(request_id=request_id, include_output=include_output))


async def test_a_request_tells_all_its_choices(served: Served) -> None:
    await served.inference.Submit(pb.SubmitRequest(request=choices(3).request))
    for name, count in (("a", 3), ("a/1", 8), ("a/2", 1)):
        served.desk.produce(name, count)
    whole = await snapshot(served, "a")
    assert [(part.choice, part.request.request_id, list(part.output_token_ids)) for part in whole.choices] == [
        (choice, name, said(served.desk, name, count)) for choice, (name, count) in enumerate((("a", 3), ("a/1", 8), ("a/2", 1)))
    ]
    states = [types.REQUEST_STATE_DECODE, types.REQUEST_STATE_DONE, types.REQUEST_STATE_DECODE]
    assert [part.request.state for part in whole.choices] == states
    assert (whole.output_token_ids, whole.output_text) == (whole.choices[0].output_token_ids, whole.choices[0].output_text)
    one = await snapshot(served, "a/1")
    assert (list(one.output_token_ids), len(one.choices)) == (said(served.desk, "a/1", 8), 0)
    assert not (await snapshot(served, "a", include_output=False)).choices[1].output_token_ids


async def test_a_request_for_the_best_tells_them_once_all_have_ended(served: Served) -> None:
    """As its stream does: the shortest has the highest mean log probability here."""
    ending_after(served.desk, 8, 6, 2, 4)
    await served.inference.Submit(pb.SubmitRequest(request=choices(2, best_of=4).request))
    for name in ("a", "a/1", "a/2"):
        served.desk.produce(name, 8)
    before = await snapshot(served, "a")
    assert (len(before.choices), len(before.output_token_ids), before.output_text) == (0, 0, "")
    served.desk.produce("a/3", 8)
    after = await snapshot(served, "a")
    assert [(part.choice, part.request.request_id) for part in after.choices] == [(0, "a/2"), (1, "a/3")]
    stream = tokens(await events(served.inference.Attach(pb.AttachRequest(request_id="a", output=both()))))
    assert {part.choice: list(part.output_token_ids) for part in after.choices} == stream
    assert list(after.output_token_ids) == stream[0]


def test_ranking() -> None:
    """By mean, not by sum; done before others; ties by place; no tokens last."""

    def candidate(*logprobs: float, state: State = State.DONE) -> Candidate:
        return Candidate(state, [TokenLogprobs(logprob) for logprob in logprobs])

    assert best([candidate(-1.0), candidate(-0.5, -0.5, -0.5, -0.5), candidate(-0.9)], 2) == [1, 2]
    assert best([candidate(-0.1, state=State.CANCELLED), candidate(-3.0), candidate()], 3) == [1, 2, 0]
    assert best([candidate(-1.0), candidate(-1.0)], 1) == [0]


async def test_a_filter_that_names_the_first_choice_names_the_request_once(served: Served) -> None:
    await served.inference.Submit(pb.SubmitRequest(request=choices(3).request))
    await served.inference.Submit(pb.SubmitRequest(request=spec(request_id="b")))
    served.desk.produce("a", 8)
    waiting = admin_pb2.RequestFilter(states=[types.REQUEST_STATE_WAITING])
    for dry_run in (True, False):
        answer = await served.admin.CancelRequests(admin_pb2.CancelRequestsRequest(filter=waiting, dry_run=dry_run))
        assert [outcome.request_id for outcome in answer.outcomes] == ["a/1", "a/2", "b"]
    await served.inference.Submit(pb.SubmitRequest(request=spec(request_id="c", sampling=SamplingParams(n=2, max_tokens=3))))
    answer = await served.admin.CancelRequests(admin_pb2.CancelRequestsRequest(filter=admin_pb2.RequestFilter(tenant="default")))
    assert [(outcome.request_id, outcome.already_ended) for outcome in answer.outcomes] == [("c", False)]
    assert served.desk.entries["c/1"].state is State.CANCELLED


async def test_a_dry_run_looks_at_every_choice(served: Served) -> None:
    await served.inference.Submit(pb.SubmitRequest(request=choices(2).request))
    served.desk.end("a", State.EXPIRED)
    for dry_run, states in ((True, (State.EXPIRED, State.WAITING)), (False, (State.EXPIRED, State.CANCELLED))):
        answer = await served.admin.CancelRequests(admin_pb2.CancelRequestsRequest(request_ids=["a"], dry_run=dry_run))
        assert [outcome.already_ended for outcome in answer.outcomes] == [False]
        assert (served.desk.entries["a"].state, served.desk.entries["a/1"].state) == states
