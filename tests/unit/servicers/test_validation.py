"""What is refused at the door, with the field at fault; what is valid at the edge passes; and nothing is stored before."""

from __future__ import annotations

import asyncio
import math
import threading
from typing import Any

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenmill.inference.v1 import inference_pb2 as pb
from tokenmill.inference.v1.types_pb2 import SamplingParams
from tokenmill_scheduler.core.request import Lane
from tokenmill_scheduler.intake import Intake, InvalidArgument
from tokenmill_scheduler.intake.violations import MAX_VIOLATIONS
from tokenmill_scheduler.text.model import TextModel

from tests.fakes.desk import FakeDesk
from tests.fakes.text_models import byte_level_tokenizer
from tests.unit.servicers.calls import refusal, spec, violations
from tests.unit.servicers.conftest import Served, served_model

VOCAB = byte_level_tokenizer().get_vocab_size()


async def refused(served: Served, request: pb.RequestSpec) -> dict[str, str]:
    """Field → description of a submission that must fail; the next one must pass, and only it may be stored."""
    found = violations(await refusal(served.inference.Submit(pb.SubmitRequest(request=request))))
    await accepted(served, spec())
    assert len(served.desk.entries) == 1
    return found


async def accepted(served: Served, request: pb.RequestSpec) -> pb.SubmitResponse:
    return await served.inference.Submit(pb.SubmitRequest(request=request))


def text(value: str) -> pb.Prompt:
    return pb.Prompt(text=value)


def chat(*messages: tuple[str, str]) -> pb.Prompt:
    return pb.Prompt(chat=pb.ChatMessages(messages=[pb.ChatMessage(role=role, content=content) for role, content in messages]))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("temperature", value) for value in (math.nan, math.inf, -math.inf, -0.1)),
        *(("top_p", value) for value in (math.nan, 0.0, 1.1, math.inf, -0.1)),
        *(("min_p", value) for value in (2.0, -0.1, math.nan)),
        ("top_k", -2),
        *(("repetition_penalty", value) for value in (0.0, 1e-38, 0.009, 100.1, -1.0, math.nan, math.inf)),
        *(("presence_penalty", value) for value in (2.1, -2.1, math.nan)),
        *(("frequency_penalty", value) for value in (2.1, -2.1, math.inf)),
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("min_tokens", -1),
        ("logprobs", 21),
        ("logprobs", -1),
    ],
)
async def test_c49_numbers_outside_their_range(served: Served, field: str, value: Any) -> None:
    found = await refused(served, spec(sampling=SamplingParams(**{field: value})))
    assert list(found) == [f"request.sampling.{field}"]


async def test_a_violation_shows_a_whole_number_as_it_was_sent(served: Served) -> None:
    found = await refused(served, spec(sampling=SamplingParams(max_tokens=-(2**31), temperature=-0.5)))
    assert found["request.sampling.max_tokens"].endswith("got -2147483648")
    assert found["request.sampling.temperature"].endswith("got -0.5")


@pytest.mark.parametrize(
    "fields",
    [
        {"repetition_penalty": 0.01},
        {"repetition_penalty": 100.0},
        {"top_p": 1.0},
        {"temperature": 0.0},
        {"top_k": -1},
        {"top_k": 0},
        {"min_p": 0.0},
        {"min_p": 1.0},
        {"presence_penalty": 2.0, "frequency_penalty": -2.0},
        {"logprobs": 0},
        {"logprobs": 20},
        {"seed": 2**64 - 1},
        {"max_tokens": 4, "min_tokens": 4},
        {"stop": ["x" * 256] * 16},
        {"logit_bias": {0: 100.0, VOCAB - 1: -100.0}},
        {"stop_token_ids": [0, VOCAB - 1]},
    ],
    ids=str,
)
async def test_c49_c50_values_at_the_edge_are_valid(served: Served, fields: dict[str, Any]) -> None:
    assert (await accepted(served, spec(sampling=SamplingParams(**fields)))).prompt_tokens == 3


@pytest.mark.parametrize("token_id", [-1, VOCAB, 2**40])
async def test_c50_stop_token_ids_outside_the_vocabulary(served: Served, token_id: int) -> None:
    found = await refused(served, spec(sampling=SamplingParams(stop_token_ids=[0, token_id])))
    assert list(found) == ["request.sampling.stop_token_ids[1]"]


@pytest.mark.parametrize(
    "bias", [{-1: 1.0}, {VOCAB: 1.0}, {3: 100.5}, {3: math.nan}, {3: math.inf}, dict.fromkeys(range(1_025), 0.0)]
)
async def test_c51_logit_bias_outside_the_vocabulary_or_range_or_of_too_many(served: Served, bias: dict[int, float]) -> None:
    assert list(await refused(served, spec(sampling=SamplingParams(logit_bias=bias)))) == ["request.sampling.logit_bias"]


@pytest.mark.parametrize("token_id", [-1, VOCAB, 2**40])
async def test_c51_prompt_ids_outside_the_vocabulary(served: Served, token_id: int) -> None:
    found = await refused(served, spec([1, 2, token_id]))
    assert list(found) == ["request.prompt.token_ids"]
    assert str(token_id) in found["request.prompt.token_ids"]


async def test_c51_first_and_last_id_are_valid(served: Served) -> None:
    assert (await accepted(served, spec([0, VOCAB - 1]))).prompt_tokens == 2


@pytest.mark.parametrize(
    ("prompt", "field"),
    [
        (text(""), "request.prompt.text"),
        (pb.Prompt(token_ids=pb.TokenIds()), "request.prompt.token_ids"),
        (pb.Prompt(chat=pb.ChatMessages()), "request.prompt.chat"),
        (pb.Prompt(), "request.prompt"),
        (chat(("user", "hi"), ("", "hi")), "request.prompt.chat.messages[1].role"),
        (chat(("pirate", "arr")), "request.prompt.chat"),
    ],
)
async def test_c52_empty_prompts_and_messages_the_template_refuses(served: Served, prompt: pb.Prompt, field: str) -> None:
    assert list(await refused(served, spec(prompt=prompt))) == [field]


async def test_c29_a_prompt_larger_than_the_pool_is_refused_with_the_reason(served: Served) -> None:
    served.desk.served["tiny"] = served_model(max_model_len=4096, pool_tokens=64 * 16)
    found = await refused(served, spec([5] * 1_100))
    assert "1024" in found["request.prompt"]


async def test_c30_a_prompt_must_leave_room_for_one_token(served: Served) -> None:
    served.desk.served["tiny"] = served_model(pool_tokens=8192)
    assert (await accepted(served, spec([5] * 4095, SamplingParams()))).prompt_tokens == 4095
    served.desk.entries.clear()
    found = await refused(served, spec([5] * 4096, SamplingParams()))
    assert list(found) == ["request.prompt"]
    assert "4096" in found["request.prompt"]


async def test_c30_max_tokens_must_fit_behind_the_prompt(served: Served) -> None:
    await accepted(served, spec([5] * 4000, SamplingParams(max_tokens=96)))
    served.desk.entries.clear()
    assert list(await refused(served, spec([5] * 4000, SamplingParams(max_tokens=97)))) == ["request.sampling.max_tokens"]


async def test_max_tokens_left_open_is_what_context_and_pool_leave(served: Served) -> None:
    answer = await accepted(served, spec([5] * 96, SamplingParams()))
    assert served.desk.entries[answer.request_id].request.sampling.max_tokens == 4000
    served.desk.served["tiny"] = served_model(pool_tokens=1024)
    answer = await accepted(served, spec([5] * 24, SamplingParams()))
    assert served.desk.entries[answer.request_id].request.sampling.max_tokens == 1000


async def test_c57_300k_ids_pass_and_a_message_over_the_limit_leaves_the_channel_up(served: Served) -> None:
    served.desk.served["tiny"] = served_model(max_model_len=400_000, pool_tokens=400_000)
    assert (await accepted(served, spec([5, VOCAB - 1] * 150_000))).prompt_tokens == 300_000
    error = await refusal(served.inference.Submit(pb.SubmitRequest(request=spec([5] * 2_200_000))))
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert (await accepted(served, spec())).prompt_tokens == 3


@pytest.mark.parametrize(
    ("stops", "field"), [([""], "stop[0]"), (["ok", "x" * 257], "stop[1]"), (["x"] * 17, "stop")], ids=["empty", "long", "many"]
)
async def test_stop_strings_have_bounds(served: Served, stops: list[str], field: str) -> None:
    assert list(await refused(served, spec(sampling=SamplingParams(stop=stops)))) == [f"request.sampling.{field}"]


async def test_min_tokens_above_max_tokens(served: Served) -> None:
    assert list(await refused(served, spec(sampling=SamplingParams(max_tokens=3, min_tokens=4)))) == ["request.sampling.min_tokens"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("request_id", "a b"),
        ("request_id", "x" * 129),
        ("request_id", "id\n"),
        ("tenant", "té"),
        ("tenant", "x" * 65),
        ("tenant", "a:b"),
        ("priority", 1001),
        ("priority", -1001),
        ("timeout", Duration()),
        ("queue_timeout", Duration()),
        ("queue_timeout", Duration(seconds=400 * 24 * 3600)),
        ("lane", 9),
        ("timeout", Duration(seconds=-1)),
        ("timeout", Duration(seconds=400 * 24 * 3600)),
        ("cache_salt", "x" * 257),
    ],
)
async def test_the_envelope_is_checked(served: Served, field: str, value: Any) -> None:
    assert list(await refused(served, spec(**{field: value}))) == [f"request.{field}"]


async def test_the_envelope_is_carried_over(served: Served) -> None:
    sampling = SamplingParams(seed=7, stop=["b", "a", "b"], stop_token_ids=[4, 4, 2], logit_bias={9: 1.0, 3: -1.0}, top_k=-1)
    timeout = Duration(seconds=2, nanos=500_000_000)
    more: Any = {"lane": Lane.BATCH.value, "queue_timeout": Duration(seconds=1)}
    await accepted(served, spec(sampling=sampling, request_id="A.b_c:d-9", tenant="t", priority=-1000, timeout=timeout, **more))
    request = served.desk.entries["A.b_c:d-9"].request
    assert request.tenant == "t"
    assert request.priority == -1000
    assert request.deadline_s is not None
    assert request.deadline_s - request.arrival_s == pytest.approx(2.5)
    assert request.queue_deadline_s == request.arrival_s + 1
    assert request.lane is Lane.BATCH
    assert request.detached, "what Submit takes runs detached"
    assert request.stop == ("b", "a")
    assert request.sampling.stop_token_ids == (4, 2)
    assert request.sampling.logit_bias == ((3, -1.0), (9, 1.0))
    assert (request.sampling.seed, request.sampling.top_k) == (7, 0)


async def test_everything_wrong_is_told_at_once_and_fits_into_metadata(served: Served) -> None:
    sampling = SamplingParams(
        temperature=-1,
        top_p=2,
        top_k=-2,
        min_p=2,
        repetition_penalty=0,
        presence_penalty=3,
        frequency_penalty=3,
        max_tokens=0,
        min_tokens=-1,
        logprobs=99,
        stop=["y" * 300] * 20,
        stop_token_ids=[-1],
        logit_bias={-1: 0.0},
    )
    envelope = {"request_id": "?" * 5_000, "tenant": "?" * 5_000, "priority": 10**6, "cache_salt": "x" * 300}
    found = await refused(served, spec([-1], sampling, **envelope))
    assert len(found) == MAX_VIOLATIONS
    for field in ("request.request_id", "request.prompt.token_ids", "request.sampling.temperature", "request.sampling.logprobs"):
        assert field in found


async def test_an_unknown_model_is_not_found_and_several_need_a_name(served: Served) -> None:
    error = await refusal(served.inference.Submit(pb.SubmitRequest(request=spec(model="other"))))
    assert error.code() is grpc.StatusCode.NOT_FOUND
    served.desk.served["other"] = served_model("other")
    found = violations(await refusal(served.inference.Submit(pb.SubmitRequest(request=spec()))))
    assert found == {"request.model": "must name one of the models served: other, tiny"}
    assert (await accepted(served, spec(model="other"))).prompt_tokens == 3


async def test_prompts_as_text_and_chat(served: Served) -> None:
    tokenizer = byte_level_tokenizer()
    answer = await accepted(served, spec(prompt=text("hello 你好")))
    assert list(served.desk.entries[answer.request_id].request.prompt) == tokenizer.encode("hello 你好").ids
    answer = await accepted(served, spec(prompt=chat(("user", "hello"))))
    assert tokenizer.decode(list(served.desk.entries[answer.request_id].request.prompt)) == "[user]hello\n[assistant]"


async def test_tokenize_answers_as_a_prompt_is_read_whatever_its_length(served: Served) -> None:
    long = "hello " * 5_000
    answer = await served.inference.Tokenize(pb.TokenizeRequest(prompt=text(long)))
    assert list(answer.token_ids) == byte_level_tokenizer().encode(long).ids
    assert answer.max_model_len == 4096
    found = violations(await refusal(served.inference.Tokenize(pb.TokenizeRequest(prompt=text("")))))
    assert list(found) == ["prompt.text"]


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        (text("a" * 1_000_001), "has 1000001 characters; the model takes 4096 tokens"),
        (chat(("user", "a" * 600_000), ("user", "a" * 600_000)), "has 1200000 characters; the model takes 4096 tokens"),
        (chat(*[("user", "a")] * 4_097), "has 4097 messages; the model takes 4096 tokens"),
    ],
    ids=["text", "chat", "messages"],
)
async def test_what_no_tokens_would_make_fit_is_refused_unread(
    served: Served, monkeypatch: pytest.MonkeyPatch, prompt: pb.Prompt, words: str
) -> None:
    monkeypatch.setattr(TextModel, "_encode", None)
    found = violations(await refusal(served.inference.Submit(pb.SubmitRequest(request=spec(prompt=prompt)))))
    assert found == {f"request.prompt.{prompt.WhichOneof('form')}": words}
    found = violations(await refusal(served.inference.Tokenize(pb.TokenizeRequest(prompt=prompt))))
    assert found == {f"prompt.{prompt.WhichOneof('form')}": words}


async def test_a_long_text_that_tokens_may_make_fit_is_read(served: Served) -> None:
    served.desk.served["tiny"] = served_model(max_model_len=1_000_000, pool_tokens=1_000_000)
    assert (await accepted(served, spec(prompt=text("hello " * 200_000)))).prompt_tokens < 1_000_000


async def test_long_texts_keep_no_thread_from_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reads of the ledger run in asyncio's own threads, of which there are 32 at most."""
    go_on = threading.Event()
    monkeypatch.setattr(TextModel, "_encode", lambda *_, **__: [5] if go_on.wait() else [])
    intake = Intake(FakeDesk(served_model()))
    reading = [asyncio.create_task(intake.tokenize("", text("hello " * 500))) for _ in range(40)]
    await asyncio.sleep(0)
    try:
        async with asyncio.timeout(30):
            assert await asyncio.to_thread(lambda: "read") == "read"
    finally:
        go_on.set()
    assert [token_ids for _, token_ids in await asyncio.gather(*reading)] == [[5]] * 40


@pytest.mark.parametrize("max_tokens", [1, 4096])
async def test_a_prompt_that_leaves_no_room_is_not_blamed_on_max_tokens(served: Served, max_tokens: int) -> None:
    assert list(await refused(served, spec([5] * 5_000, SamplingParams(max_tokens=max_tokens)))) == ["request.prompt"]


@settings(deadline=None)
@given(st.floats(width=32), st.floats(width=32), st.integers(-(2**31), 2**31 - 1), st.integers(-(2**63), 2**63 - 1))
async def test_no_number_gets_past_its_range(temperature: float, top_p: float, top_k: int, stop_id: int) -> None:
    params = SamplingParams(temperature=temperature, top_p=top_p, top_k=top_k, stop_token_ids=[stop_id])
    valid = 0 <= temperature < math.inf and 0 < top_p <= 1 and top_k >= -1 and 0 <= stop_id < VOCAB
    try:
        await Intake(FakeDesk(served_model())).take(spec(sampling=params), detached=False)
    except InvalidArgument:
        assert not valid
    else:
        assert valid
