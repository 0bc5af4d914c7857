"""Unary calls: records out, retries, deadlines, typed errors."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime

import grpc
import pytest
from tokenmill.inference.v1 import types_pb2
from tokenmill_client import (
    AlreadyEnded,
    AlreadyExists,
    AsyncClient,
    DeadlineExceeded,
    FinishReason,
    InvalidRequest,
    Lane,
    NotFound,
    RequestFilter,
    RequestState,
    ResourceExhausted,
    ServerError,
    TokenmillError,
    Unavailable,
)
from tokenmill_client.errors import QueueFull
from tokenmill_client.identity import new_request_id

from tests.unit.client.conftest import QUICK
from tests.unit.client.fake_server import STARTED_AT, FakeServer, bad_request, token, whole_text

# ---- what goes out -------------------------------------------------------------------------------------------------------------


async def test_every_option_reaches_the_request(server: FakeServer, client: AsyncClient) -> None:
    options = {
        "temperature": 0.5,
        "top_p": 0.75,
        "top_k": 4,
        "min_p": 0.25,
        "repetition_penalty": 1.5,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "seed": 2**63,
        "max_tokens": 6,
        "min_tokens": 2,
        "include_stop_str_in_output": True,
        "ignore_eos": True,
        "logprobs": 0,
    }
    more = {"stop": "END", "stop_token_ids": [7], "logit_bias": {3: -1.0}}
    place = {"request_id": "mine", "model": "m", "priority": -5, "tenant": "t", "cache_salt": "s"}
    await client.submit(messages=[{"role": "user", "content": "hi"}], timeout=2.5, **options, **more, **place)  # type: ignore[arg-type]
    spec = server.requests["mine"].spec
    present = {field.name: value for field, value in spec.sampling.ListFields()}
    assert {name: present[name] for name in options} == options
    assert (list(present["stop"]), list(present["stop_token_ids"]), dict(present["logit_bias"])) == (["END"], [7], {3: -1.0})
    assert {name: getattr(spec, name) for name in place} == place
    assert spec.timeout.ToMilliseconds() == 2500
    assert [(turn.role, turn.content) for turn in spec.prompt.chat.messages] == [("user", "hi")]


async def test_absent_options_are_left_to_the_server(server: FakeServer, client: AsyncClient) -> None:
    submitted = await client.submit(token_ids=[1, 2, 3])
    spec = server.requests[submitted.request_id].spec
    assert spec.sampling.ListFields() == []
    assert not spec.HasField("timeout")
    assert list(spec.prompt.token_ids.ids) == [1, 2, 3]


async def test_an_empty_prompt_is_the_servers_to_refuse(server: FakeServer, client: AsyncClient) -> None:
    submitted = await client.submit(token_ids=[])
    assert server.requests[submitted.request_id].spec.prompt.WhichOneof("form") == "token_ids"


@pytest.mark.parametrize("forms", [{}, {"prompt": "a", "token_ids": [1]}, {"messages": [], "token_ids": [1]}])
async def test_exactly_one_form_of_a_prompt(client: AsyncClient, forms: dict[str, object]) -> None:
    with pytest.raises(TypeError, match="exactly one"):
        await client.submit(**forms)  # type: ignore[arg-type]


async def test_a_misspelt_option_is_refused(client: AsyncClient) -> None:
    with pytest.raises(TypeError, match=r"There is no option max_token, seeed\."):
        client.generate("hi", max_token=5, seeed=1)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="There is no option detached"):
        await client.submit("hi", detached=True)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="There is no option text"):
        await client.tokenize(text="hi")  # type: ignore[call-arg]


async def test_a_lane_may_be_a_word(server: FakeServer, client: AsyncClient) -> None:
    await client.submit("hi", request_id="mine", lane="batch")
    assert server.requests["mine"].spec.lane == types_pb2.LANE_BATCH
    with pytest.raises(InvalidRequest, match="'fast' is not a valid Lane") as caught:
        await client.submit("hi", lane="fast")  # type: ignore[arg-type]
    assert [field for field, _ in caught.value.violations] == ["lane"]


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"max_tokens": 2**40}, "sampling.max_tokens"),
        ({"seed": -1}, "sampling.seed"),
        ({"temperature": "hot"}, "sampling.temperature"),
        ({"stop_token_ids": [2**70]}, "sampling.stop_token_ids"),
        ({"logit_bias": {"x": 1.0}}, "sampling.logit_bias"),
        ({"priority": 1.5}, "priority"),
    ],
)
async def test_a_value_that_does_not_fit_names_its_field(client: AsyncClient, options: dict[str, object], name: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        await client.submit("a", **options)  # type: ignore[arg-type]
    assert [field for field, _ in caught.value.violations] == [name]


async def test_an_index_that_is_none_names_its_field(client: AsyncClient) -> None:
    with pytest.raises(InvalidRequest, match="next_index: "):
        await client.attach("a", -1).result()


def test_request_ids_are_valid_distinct_and_in_order() -> None:
    ids = [new_request_id() for _ in range(100)]
    assert len(set(ids)) == 100
    assert all(len(request_id) == 30 and request_id.startswith("req-") and request_id.islower() for request_id in ids)
    assert ids[0][:10] <= ids[-1][:10]


# ---- what comes back -----------------------------------------------------------------------------------------------------------


async def test_get_request(client: AsyncClient) -> None:
    stream = client.generate("hello", max_tokens=4, tenant="t", priority=3)
    await stream.result()
    snapshot = await client.get_request(stream.request_id, include_output=True)
    assert snapshot.output_text == whole_text(stream.request_id, 4)
    assert snapshot.output_token_ids == tuple(token(stream.request_id, index) for index in range(4))
    info = snapshot.info
    assert (info.state, info.state.ended, info.tenant, info.priority) == (RequestState.DONE, True, "t", 3)
    assert (info.submitted_at, info.first_token_at) == (STARTED_AT, None)
    assert (await client.get_request(stream.request_id)).output_text == ""


async def test_get_request_of_several_choices(client: AsyncClient) -> None:
    stream = client.generate("hello", max_tokens=4, n=2)
    await stream.results()
    snapshot = await client.get_request(stream.request_id, include_output=True)
    names = [stream.request_id, f"{stream.request_id}/1"]
    assert [(part.choice, part.info.request_id, part.output_text) for part in snapshot.choices] == [
        (choice, name, whole_text(name, 4)) for choice, name in enumerate(names)
    ]


async def test_filters_take_words(server: FakeServer, client: AsyncClient) -> None:
    await client.submit("a", request_id="a", lane=Lane.BATCH)
    words = RequestFilter(states=("Decode",), lanes=("real-time", "BATCH"))
    assert [info.request_id async for info in client.admin.list_requests(words)] == ["a"]
    with pytest.raises(InvalidRequest, match=r"states: 'happy' is none of waiting, .*failed"):
        _ = [info async for info in client.admin.list_requests(RequestFilter(states=("happy",)))]
    with pytest.raises(InvalidRequest, match="lanes: 'fast' is none of real_time, standard, batch"):
        await client.admin.cancel_requests(condition=RequestFilter(lanes=("fast",)))


async def test_tokenize_and_list_models(client: AsyncClient) -> None:
    tokenized = await client.tokenize("hi")
    assert (tokenized.token_ids, tokenized.max_model_len) == ((104, 105), 2048)
    (model,) = await client.list_models()
    assert (model.name, model.vocab_size, model.executors) == ("oracle", 50_000, 1)


async def test_lists_requests_over_pages(client: AsyncClient) -> None:
    ids = [(await client.submit("a", request_id=f"r{number}", priority=number)).request_id for number in range(7)]
    listed = [info.request_id async for info in client.admin.list_requests(page_size=3)]
    assert listed == ids[::-1]
    condition = RequestFilter(states=(RequestState.DECODE,), min_priority=2, max_priority=4)
    listed = [info.request_id async for info in client.admin.list_requests(condition, oldest_first=True, page_size=2)]
    assert listed == ["r2", "r3", "r4"]


async def test_admin_calls(client: AsyncClient) -> None:
    await client.submit("a", request_id="a")
    life = await client.admin.get_request("a")
    assert [(move.before, move.after) for move in life.transitions] == [
        (None, RequestState.WAITING),
        (RequestState.WAITING, RequestState.PREFILL),
    ]
    deadline = datetime(2030, 1, 1, tzinfo=UTC)
    updated = await client.admin.update_request("a", priority=9, deadline=deadline)
    assert (updated.priority, updated.deadline) == (9, deadline)
    (executor,) = await client.admin.list_executors()
    assert (executor.name, executor.total_blocks, executor.idle_share, executor.joined_at) == ("executor-0", 64, 0.25, STARTED_AT)
    load = await client.admin.get_load()
    assert (load.batching, load.max_num_seqs, load.batch_occupancy) == ("continuous", 8, 0.5)


async def test_cancel_requests(client: AsyncClient) -> None:
    await client.submit("a", request_id="a")
    (would,) = await client.admin.cancel_requests(["a"], dry_run=True)
    assert (would.state, would.already_ended) == (RequestState.DECODE, False)
    done, missing = await client.admin.cancel_requests(["a", "b"], reason="tidy")
    assert (done.state, done.not_found) == (RequestState.CANCELLED, False)
    assert (missing.state, missing.not_found) == (None, True)
    (again,) = await client.admin.cancel_requests(condition=RequestFilter(tenant="default"))
    assert again.already_ended


def test_every_state_and_finish_reason_of_the_protocol_has_its_record() -> None:
    enums = types_pb2.DESCRIPTOR.enum_types_by_name
    states = {value.name.removeprefix("REQUEST_STATE_") for value in enums["RequestState"].values}
    reasons = {value.name.removeprefix("FINISH_REASON_") for value in enums["FinishReason"].values}
    assert states - {"UNSPECIFIED"} == {state.name for state in RequestState}
    assert reasons - {"UNSPECIFIED"} == {reason.name for reason in FinishReason}


# ---- failures ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (grpc.StatusCode.INVALID_ARGUMENT, InvalidRequest),
        (grpc.StatusCode.OUT_OF_RANGE, InvalidRequest),
        (grpc.StatusCode.NOT_FOUND, NotFound),
        (grpc.StatusCode.ALREADY_EXISTS, AlreadyExists),
        (grpc.StatusCode.FAILED_PRECONDITION, AlreadyEnded),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, ResourceExhausted),
        (grpc.StatusCode.DEADLINE_EXCEEDED, DeadlineExceeded),
        (grpc.StatusCode.INTERNAL, ServerError),
        (grpc.StatusCode.UNIMPLEMENTED, ServerError),
    ],
)
async def test_each_status_has_its_error(
    server: FakeServer, client: AsyncClient, code: grpc.StatusCode, kind: type[TokenmillError]
) -> None:
    server.refuse(code, "because")
    with pytest.raises(kind, match="because") as caught:
        await client.list_models()
    assert type(caught.value) is kind
    assert caught.value.code == code.name
    assert not isinstance(caught.value, QueueFull)
    assert server.calls == ["ListModels"]


async def test_unavailable_is_tried_again(server: FakeServer, client: AsyncClient) -> None:
    for _ in range(3):
        server.refuse(grpc.StatusCode.UNAVAILABLE, "not yet")
    assert len(await client.list_models()) == 1
    assert server.calls == ["ListModels"] * 4


async def test_several_violations(server: FakeServer, client: AsyncClient) -> None:
    server.refuse(grpc.StatusCode.INVALID_ARGUMENT, "no", bad_request(("prompt", "is empty"), ("priority", "is too high")))
    with pytest.raises(InvalidRequest) as caught:
        await client.submit("")
    assert caught.value.violations == (("prompt", "is empty"), ("priority", "is too high"))


async def test_nothing_there() -> None:
    async with AsyncClient("127.0.0.1:1", retry=QUICK, timeout=0.2) as client:
        with pytest.raises((Unavailable, DeadlineExceeded)):
            await client.list_models()
        with pytest.raises(Unavailable, match="not ready within"):
            await client.wait_ready(timeout=0.1)


async def test_wait_ready_waits_for_an_executor(server: FakeServer, client: AsyncClient) -> None:
    server.serving = False
    waiting = asyncio.create_task(client.wait_ready(timeout=20))
    with pytest.raises(Unavailable):
        await client.wait_ready(timeout=0.05)
    assert not waiting.done()
    server.serving = True
    await waiting
