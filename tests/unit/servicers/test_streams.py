"""Generate and Attach: events in order, indexes without gap, text that adds up, readers that leave."""

from __future__ import annotations

import asyncio

import grpc
import pytest
import structlog
from google.rpc import code_pb2, error_details_pb2
from tokenmill.inference.v1 import inference_pb2 as pb
from tokenmill.inference.v1 import types_pb2 as types
from tokenmill.inference.v1.types_pb2 import SamplingParams, StreamEvent
from tokenmill_scheduler.core.request import Request, State
from tokenmill_scheduler.desk.port import Attachment
from tokenmill_scheduler.intake import Intake
from tokenmill_scheduler.servicers.events import MAX_DELTA_TOKENS

from tests.fakes.desk import FakeDesk, oracle_logprobs, oracle_token
from tests.fakes.text_models import byte_level_tokenizer
from tests.unit.servicers.calls import both, detail, events, next_event, refusal, spec
from tests.unit.servicers.conftest import Served, served_model


@pytest.fixture(params=[False, True], ids=["calls of their own", "one call"])
def multiplexed(request: pytest.FixtureRequest) -> bool:
    """Streams are the same either way."""
    return bool(request.param)


def encoded(text: str) -> list[int]:
    return list(byte_level_tokenizer().encode(text, add_special_tokens=False).ids)


def saying(desk: FakeDesk, text: str) -> list[int]:
    """Makes the desk's requests say `text`, then begin again."""
    token_ids = encoded(text)

    def oracle(request: Request, index: int) -> int:
        return token_ids[index % len(token_ids)]

    desk.oracle = oracle
    return token_ids


def deltas(stream: list[StreamEvent]) -> list[StreamEvent.Delta]:
    return [event.delta for event in stream if event.HasField("delta")]


def joined(stream: list[StreamEvent]) -> str:
    return "".join(delta.text for delta in deltas(stream))


def indexes(stream: list[StreamEvent]) -> list[int]:
    return [delta.first_index + i for delta in deltas(stream) for i in range(delta.token_count)]


async def test_accepted_first_then_deltas_then_finished(served: Served) -> None:
    call = served.inference.Generate(pb.GenerateRequest(request=spec(request_id="a"), output=both()))
    accepted = (await next_event(call)).accepted
    assert (accepted.request_id, accepted.prompt_tokens) == ("a", 3)
    served.desk.produce("a", 8)
    stream = await events(call)
    assert indexes(stream) == list(range(8))
    request = served.desk.entries["a"].request
    assert [token_id for delta in deltas(stream) for token_id in delta.token_ids] == [oracle_token(request, i) for i in range(8)]
    finished = stream[-1].finished
    assert finished.state == types.REQUEST_STATE_DONE
    assert finished.finish_reason == types.FINISH_REASON_LENGTH
    assert (finished.usage.prompt_tokens, finished.usage.output_tokens) == (3, 8)


@pytest.mark.parametrize(
    ("output", "text", "token_ids"),
    [
        (None, True, False),
        (pb.OutputOptions(text=True), True, False),
        (pb.OutputOptions(token_ids=True), False, True),
        (pb.OutputOptions(), False, False),
    ],
)
async def test_a_stream_carries_what_was_asked_for(
    served: Served, output: pb.OutputOptions | None, text: bool, token_ids: bool
) -> None:
    saying(served.desk, "hello you")
    call = served.inference.Generate(pb.GenerateRequest(request=spec(request_id="a"), output=output))
    await next_event(call)
    served.desk.produce("a", 8)
    stream = await events(call)
    assert bool(joined(stream)) == text
    assert any(delta.token_ids for delta in deltas(stream)) == token_ids
    assert indexes(stream) == list(range(8))


async def test_log_probabilities_come_with_their_tokens(served: Served) -> None:
    request = spec(request_id="a", sampling=SamplingParams(max_tokens=3, logprobs=2))
    call = served.inference.Generate(pb.GenerateRequest(request=request))
    await next_event(call)
    served.desk.produce("a", 3)
    entries = [entry for delta in deltas(await events(call)) for entry in delta.logprobs]
    expected = [oracle_logprobs(index, top=2) for index in range(3)]
    assert [entry.logprob for entry in entries] == [entry.logprob for entry in expected]
    assert [[(top.token_id, top.logprob) for top in entry.top] for entry in entries] == [list(entry.top) for entry in expected]


async def test_c75_text_of_deltas_joined_equals_the_full_decode(served: Served) -> None:
    tokenizer = byte_level_tokenizer()
    prompt = tokenizer.encode("hi 🎉").ids
    output = [*prompt[-2:], *encoded(" 你好 hello 👩🏽‍🚀!")]
    served.desk.oracle = lambda request, index: output[index]
    request = spec(prompt[:-2], SamplingParams(max_tokens=len(output)), request_id="a")
    call = served.inference.Generate(pb.GenerateRequest(request=request))
    await next_event(call)
    stream = []
    for _ in output:
        served.desk.produce("a", 1)
        stream.append(await next_event(call))
    stream += await events(call)
    assert joined(stream) == "🎉 你好 hello 👩🏽‍🚀!"
    assert tokenizer.decode([*prompt[:-2], *output]) == "hi " + joined(stream)
    assert any(not delta.text for delta in deltas(stream)), "a delta tells of its token also while its text is held back"
    assert indexes(stream) == list(range(len(output)))


async def test_c72_attach_at_any_index_carries_the_rest_and_nothing_twice(served: Served) -> None:
    output = saying(served.desk, "你好 🎉 hello th")
    sampling = SamplingParams(max_tokens=len(output), stop=["the", "h!"])
    call = served.inference.Generate(pb.GenerateRequest(request=spec(sampling=sampling, request_id="a", detached=True)))
    await next_event(call)
    shown = [""]
    for _ in output:
        served.desk.produce("a", 1)
        shown.append(shown[-1] + (await next_event(call)).delta.text)
    whole = shown[-1] + joined(await events(call))
    assert whole == "你好 🎉 hello th"
    for index in range(len(output) + 1):
        stream = await events(served.inference.Attach(pb.AttachRequest(request_id="a", next_index=index)))
        assert shown[index] + joined(stream) == whole
        assert indexes(stream) == list(range(index, len(output)))


@pytest.mark.parametrize(("include", "text"), [(False, "th"), (True, "the he")])
async def test_c58_text_is_cut_where_the_stop_string_starts(served: Served, include: bool, text: str) -> None:
    saying(served.desk, "the hello hello")
    sampling = SamplingParams(max_tokens=50, stop=["zzz", "e he"], include_stop_str_in_output=include)
    call = served.inference.Generate(pb.GenerateRequest(request=spec(sampling=sampling, request_id="a"), output=both()))
    await next_event(call)
    served.desk.produce("a", 50)
    stream = await events(call)
    finished = stream[-1].finished
    assert joined(stream) == text
    assert finished.finish_reason == types.FINISH_REASON_STOP
    counted = len(encoded("the hello"))
    assert finished.usage.output_tokens == counted
    assert len(indexes(stream)) == counted


async def test_c60_nothing_beyond_the_stop_is_in_text_usage_or_output(served: Served) -> None:
    saying(served.desk, "the hello")
    submit = pb.SubmitRequest(request=spec(sampling=SamplingParams(max_tokens=50, stop=["e"]), request_id="a"))
    await served.inference.Submit(submit)
    served.desk.produce("a", 50)
    counted = len(encoded("the"))
    answer = await served.inference.GetRequest(pb.GetRequestRequest(request_id="a", include_output=True))
    assert answer.output_text == "th"
    assert len(answer.output_token_ids) == counted
    assert answer.request.usage.output_tokens == counted


async def test_c63_stop_token_is_counted_and_not_shown(served: Served) -> None:
    stop_id = encoded("hello the")[-1]
    output = saying(served.desk, "hello the")
    sampling = SamplingParams(max_tokens=len(output), stop_token_ids=[stop_id])
    call = served.inference.Generate(pb.GenerateRequest(request=spec(sampling=sampling, request_id="a"), output=both()))
    await next_event(call)
    served.desk.produce("a", 50)
    stream = await events(call)
    assert joined(stream) == byte_level_tokenizer().decode(output[:-1])
    finished = stream[-1].finished
    assert finished.finish_reason == types.FINISH_REASON_STOP
    assert finished.usage.output_tokens == len(output)


async def test_c63_one_token_is_one_token(served: Served) -> None:
    call = served.inference.Generate(pb.GenerateRequest(request=spec(sampling=SamplingParams(max_tokens=1), request_id="a")))
    await next_event(call)
    served.desk.produce("a", 9)
    stream = await events(call)
    assert indexes(stream) == [0]
    assert stream[-1].finished.usage.output_tokens == 1


async def test_c64_a_slow_reader_gets_few_deltas_and_every_token(served: Served) -> None:
    call = served.inference.Generate(pb.GenerateRequest(request=spec(sampling=SamplingParams(max_tokens=4_000), request_id="a")))
    await next_event(call)
    served.desk.produce("a", 1)
    await next_event(call)
    served.desk.produce("a", 3_999)
    stream = await events(call)
    assert indexes(stream) == list(range(1, 4_000))
    assert len(deltas(stream)) <= 3


async def test_a_late_reader_of_a_long_output_gets_messages_of_a_bounded_size(served: Served) -> None:
    sampling = SamplingParams(max_tokens=4_000, logprobs=20)
    await served.inference.Submit(pb.SubmitRequest(request=spec(sampling=sampling, request_id="a")))
    served.desk.produce("a", 4_000)
    stream = await events(served.inference.Attach(pb.AttachRequest(request_id="a", next_index=1, output=both())))
    assert indexes(stream) == list(range(1, 4_000))
    assert all(delta.token_count == len(delta.token_ids) == len(delta.logprobs) <= MAX_DELTA_TOKENS for delta in deltas(stream))
    assert deltas(stream)[-1].logprobs[-1].logprob == oracle_logprobs(3_999, top=0).logprob


async def test_c12_cancel_by_another_client_ends_the_stream(served: Served) -> None:
    call = served.inference.Generate(pb.GenerateRequest(request=spec(request_id="a")))
    await next_event(call)
    await served.inference.Cancel(pb.CancelRequest(request_id="a", reason="no longer wanted"))
    finished = (await next_event(call)).finished
    assert finished.state == types.REQUEST_STATE_CANCELLED
    assert finished.finish_reason == types.FINISH_REASON_CANCELLED
    assert finished.error == "no longer wanted"


async def test_a_failed_request_says_why_and_keeps_its_tokens(served: Served) -> None:
    call = served.inference.Generate(pb.GenerateRequest(request=spec(request_id="a")))
    await next_event(call)
    served.desk.produce("a", 2)
    served.desk.end("a", State.FAILED, "too long for the KV cache", code_pb2.RESOURCE_EXHAUSTED)
    finished = (await events(call))[-1].finished
    assert finished.state == types.REQUEST_STATE_FAILED
    assert finished.error_code == code_pb2.RESOURCE_EXHAUSTED
    assert finished.usage.output_tokens == 2


@pytest.mark.parametrize("detached", [False, True])
async def test_c13_a_dropped_stream_cancels_unless_detached(served: Served, detached: bool) -> None:
    call = served.inference.Generate(pb.GenerateRequest(request=spec(request_id="a", detached=detached)))
    await next_event(call)
    served.desk.produce("a", 3)
    await next_event(call)
    call.cancel()
    await served.desk.until(lambda: served.desk.open_streams == 0)
    assert served.desk.entries["a"].state is (State.DECODE if detached else State.CANCELLED)


async def test_c13_a_client_that_goes_while_tokens_flow_is_noticed_by_the_writer(served: Served) -> None:
    with structlog.testing.capture_logs() as logs:
        for number in range(20):
            request = spec(sampling=SamplingParams(max_tokens=4_000), request_id=f"r{number}")
            call = served.inference.Generate(pb.GenerateRequest(request=request))
            await next_event(call)
            call.cancel()
            while served.desk.open_streams:
                served.desk.produce(f"r{number}", 1)
                await asyncio.sleep(0)
            assert served.desk.entries[f"r{number}"].state is State.CANCELLED
    assert not logs, "a client that goes is no error"


async def test_a_client_that_goes_during_the_submit_leaves_no_request_behind(served: Served, desk: FakeDesk) -> None:
    """The submit is durable, its handler is gone: someone must close the stream that nobody reads."""
    generating = served.servicer.Generate(pb.GenerateRequest(request=spec(request_id="a")), None)
    task = asyncio.ensure_future(anext(generating))
    await desk.until(lambda: "a" in desk.entries)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await desk.until(lambda: desk.entries["a"].state is State.CANCELLED)
    assert desk.open_streams == 0


async def test_the_last_of_two_streams_takes_the_request_with_it(served: Served) -> None:
    first = served.inference.Generate(pb.GenerateRequest(request=spec(request_id="a")))
    await next_event(first)
    second = served.inference.Attach(pb.AttachRequest(request_id="a"))
    await next_event(second)
    first.cancel()
    await served.desk.until(lambda: served.desk.open_streams == 1)
    assert served.desk.entries["a"].ended is None
    second.cancel()
    await served.desk.until(lambda: served.desk.entries["a"].state is State.CANCELLED)


async def test_c45_shutdown_ends_streams_as_unavailable(served: Served) -> None:
    call = served.inference.Generate(pb.GenerateRequest(request=spec(request_id="a")))
    await next_event(call)
    served.desk.shut_down()
    error = await refusal(call.read())
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    assert detail(error, error_details_pb2.RetryInfo).retry_delay.ToTimedelta().total_seconds() == 2.0
    await served.desk.until(lambda: served.desk.open_streams == 0)


async def test_a_stream_that_ends_without_its_request_asks_the_client_to_come_again(served: Served) -> None:
    """A client takes the end of a stream for the end of its request only when Finished says so."""
    await served.inference.Submit(pb.SubmitRequest(request=spec(request_id="a")))
    attachment = await served.desk.attach("a", 0)
    await attachment.chunks.aclose()

    async def attach(request_id: str, next_index: int) -> Attachment:
        return attachment

    served.desk.attach = attach  # type: ignore[method-assign]
    call = served.inference.Attach(pb.AttachRequest(request_id="a"))
    await next_event(call)
    assert (await refusal(call.read())).code() is grpc.StatusCode.UNAVAILABLE


async def test_attach_beyond_the_tokens_made_is_out_of_range(served: Served) -> None:
    await served.inference.Submit(pb.SubmitRequest(request=spec(request_id="a")))
    error = await refusal(served.inference.Attach(pb.AttachRequest(request_id="a", next_index=1)).read())
    assert error.code() is grpc.StatusCode.OUT_OF_RANGE
    error = await refusal(served.inference.Attach(pb.AttachRequest(request_id="b")).read())
    assert error.code() is grpc.StatusCode.NOT_FOUND


async def test_token_ids_are_served_before_the_model_is_known_again(served: Served) -> None:
    """After a restart a stream of ids needs no tokenizer; one of text is to come again."""
    await served.inference.Submit(pb.SubmitRequest(request=spec(request_id="a")))
    served.desk.produce("a", 8)
    served.desk.served.clear()
    ids = pb.OutputOptions(token_ids=True)
    assert indexes(await events(served.inference.Attach(pb.AttachRequest(request_id="a", output=ids)))) == list(range(8))
    error = await refusal(served.inference.Attach(pb.AttachRequest(request_id="a")).read())
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    await served.desk.until(lambda: served.desk.open_streams == 0)
    served.desk.served["tiny"] = served_model()
    assert joined(await events(served.inference.Attach(pb.AttachRequest(request_id="a"))))


async def test_text_of_a_model_that_only_another_scheduler_serves_is_to_be_asked_for_there(served: Served) -> None:
    await served.inference.Submit(pb.SubmitRequest(request=spec(request_id="a")))
    served.desk.served["other"] = served.desk.served.pop("tiny")
    for call in (
        served.inference.Attach(pb.AttachRequest(request_id="a")).read(),
        served.inference.GetRequest(pb.GetRequestRequest(request_id="a", include_output=True)),
    ):
        error = await refusal(call)
        assert error.code() is grpc.StatusCode.UNAVAILABLE


async def test_c72_a_client_that_comes_back_before_the_model_does_not_lose_its_request(served: Served) -> None:
    """It reads alone, and its request is not detached: a stream opened and closed again would be the last one's leaving."""
    intake = Intake(served.desk)
    taken = await intake.take(spec(request_id="a"), detached=False)
    await served.desk.submit(taken.request, taken.payload_digest)
    served.desk.served.clear()
    error = await refusal(served.inference.Attach(pb.AttachRequest(request_id="a")).read())
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    served.desk.served["tiny"] = served_model()
    call = served.inference.Attach(pb.AttachRequest(request_id="a"))
    await next_event(call)
    served.desk.produce("a", 8)
    assert (await events(call))[-1].finished.state == types.REQUEST_STATE_DONE


async def test_c09_equal_payloads_join_and_others_are_refused(served: Served) -> None:
    first = served.inference.Generate(pb.GenerateRequest(request=spec(request_id="a"), output=both()))
    second = served.inference.Generate(pb.GenerateRequest(request=spec(request_id="a"), output=both()))
    await asyncio.gather(next_event(first), next_event(second))
    other = served.inference.Generate(pb.GenerateRequest(request=spec(prompt=[9], request_id="a")))
    assert (await refusal(other.read())).code() is grpc.StatusCode.ALREADY_EXISTS
    assert len(served.desk.entries) == 1
    served.desk.produce("a", 8)
    streams = await asyncio.gather(events(first), events(second))
    tokens = [[token_id for delta in deltas(stream) for token_id in delta.token_ids] for stream in streams]
    assert tokens[0] == tokens[1]


async def test_c38_a_full_queue_says_when_to_come_again(served: Served) -> None:
    served.desk.queue_limit = 1
    await served.inference.Submit(pb.SubmitRequest(request=spec(request_id="a")))
    error = await refusal(served.inference.Submit(pb.SubmitRequest(request=spec(request_id="b"))))
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert detail(error, error_details_pb2.RetryInfo).retry_delay.ToTimedelta().total_seconds() == 0.25
    assert detail(error, error_details_pb2.ErrorInfo).reason == "QUEUE_FULL"
