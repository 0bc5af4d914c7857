"""Plans out, results in."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tokenmill.executor.v1 import executor_pb2 as pb
from tokenmill_scheduler import wire
from tokenmill_scheduler.core.plans import (
    Admission,
    BlockGroup,
    Blocks,
    ExecutorDescription,
    Fault,
    Plan,
    Result,
    SequenceFault,
    StepTimes,
    TokenLogprobs,
)
from tokenmill_scheduler.core.request import Sampling

SAMPLING = Sampling(
    max_tokens=7,
    seed=2**63 - 1,
    temperature=0.5,
    top_p=0.25,
    top_k=40,
    min_p=0.125,
    repetition_penalty=1.5,
    presence_penalty=-0.5,
    frequency_penalty=0.75,
    logit_bias=((3, -1.5), (9, 100.0)),
    min_tokens=2,
    stop_token_ids=(1, 2),
    ignore_eos=True,
    logprobs=0,
)


def plan_of(plan_id: int = 5, release: tuple[int, ...] = (), admit: tuple[Admission, ...] = ()) -> Plan:
    return Plan(2, plan_id, release, admit, advance_sequence_ids=(11, 12), advance_max_tokens=(3, 1))


def result_message(**changes: object) -> pb.Result:
    columns: dict[str, object] = {"sequence_ids": [11, 12], "num_computed": [3, 1], "num_sampled": [1, 1], "token_ids": [70, 80]}
    return pb.Result(**{"epoch": 2, "plan_id": 5, "finishes": [0, 1], **columns, **changes})  # type: ignore[arg-type]


def test_a_plan_goes_over_whole() -> None:
    admission = Admission(11, (4, 5, 6), 2, SAMPLING, cache_salt="s")
    message = wire.Codec().encode(plan_of(release=(7, 8), admit=(admission,))).plan
    assert (message.epoch, message.plan_id, list(message.release)) == (2, 5, [7, 8])
    assert list(message.advance_sequence_ids) == [11, 12]
    assert list(message.advance_max_tokens) == [3, 1]
    (sent,) = message.admit
    assert (sent.sequence_id, list(sent.token_ids), sent.num_prompt_tokens, sent.cache_salt) == (11, [4, 5, 6], 2, "s")


def test_how_many_steps_a_plan_has_and_whether_it_lets_the_one_ahead_finish_goes_over() -> None:
    for plan in (plan_of(), replace(plan_of(), max_steps=4), replace(plan_of(), after_all_steps=True)):
        message = wire.Codec().encode(plan).plan
        assert (message.max_steps, message.after_all_steps) == (plan.max_steps, plan.after_all_steps)


def test_every_sampling_field_goes_over() -> None:
    admission = Admission(11, (4,), 1, SAMPLING)
    sent = wire.Codec().encode(plan_of(admit=(admission,))).plan.admit[0].sampling
    for name in ("max_tokens", "seed", "top_k", "min_tokens", "ignore_eos", "logprobs"):
        assert getattr(sent, name) == getattr(SAMPLING, name)
    for name in ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"):
        assert getattr(sent, name) == getattr(SAMPLING, name), name
    assert list(zip(sent.logit_bias_ids, sent.logit_bias_values, strict=True)) == [(3, -1.5), (9, 100.0)]
    assert list(sent.stop_token_ids) == [1, 2]
    assert {field.name for field in sent.DESCRIPTOR.fields} == {field.name for field, _ in sent.ListFields()} | set()


def test_no_log_probabilities_and_none_beside_the_sampled_token_are_told_apart() -> None:
    without = wire.Codec().encode(plan_of(admit=(Admission(11, (4,), 1, Sampling(max_tokens=1, seed=0)),))).plan.admit[0]
    assert not without.sampling.HasField("logprobs")


def test_a_result_comes_in_whole() -> None:
    message = result_message(
        blocks=pb.Blocks(free=1, cached=2, held=3),
        times=pb.Times(queue_us=1, prepare_us=2, forward_us=3, sample_us=4, idle_us=5),
        faults=[pb.Fault(sequence_id=12, fault=pb.SEQUENCE_FAULT_NO_BLOCKS, detail="none left")],
    )
    assert wire.Codec().decode(message) == Result(
        epoch=2,
        plan_id=5,
        sequence_ids=(11, 12),
        num_computed=(3, 1),
        num_sampled=(1, 1),
        token_ids=(70, 80),
        finishes=(0, 1),
        blocks=Blocks(free=1, cached=2, held=3),
        faults={12: Fault(SequenceFault.NO_BLOCKS, "none left")},
        times=StepTimes(1, 2, 3, 4, 5),
    )


def test_log_probabilities_belong_to_the_sequences_that_asked() -> None:
    codec = wire.Codec()
    codec.encode(plan_of(admit=(Admission(12, (4,), 1, SAMPLING),)))
    entry = pb.Logprobs(logprob=-1.5, top_token_ids=[80, 3], top_logprobs=[-1.5, -2.0])
    result = codec.decode(result_message(logprobs=[entry]))
    assert result.logprobs == {1: (TokenLogprobs(-1.5, ((80, -1.5), (3, -2.0))),)}


def test_a_released_sequence_keeps_its_log_probabilities_until_the_release_is_answered() -> None:
    codec, goes_on = wire.Codec(), {"finishes": [0, 0]}
    codec.encode(plan_of(admit=(Admission(12, (4,), 1, SAMPLING),)))
    codec.encode(plan_of(6, release=(12,)))
    assert 1 in codec.decode(result_message(**goes_on, logprobs=[pb.Logprobs(logprob=-1.0)])).logprobs
    codec.decode(result_message(**goes_on, plan_id=6, num_sampled=[1, 0], token_ids=[70]))
    with pytest.raises(wire.ProtocolError, match="1 log probabilities where 0 were asked for"):
        codec.decode(result_message(**goes_on, plan_id=7, logprobs=[pb.Logprobs(logprob=-1.0)]))


@pytest.mark.parametrize(
    "changes", [{"num_computed": [3]}, {"num_sampled": [1, 1, 0]}, {"finishes": [0]}, {"token_ids": [70]}, {"num_sampled": [2, 1]}]
)
def test_columns_of_unequal_length_break_the_protocol(changes: dict[str, object]) -> None:
    with pytest.raises(wire.ProtocolError, match="result 5 has columns of unequal length"):
        wire.Codec().decode(result_message(**changes))


@pytest.mark.parametrize(
    "entry", [pb.Logprobs(logprob=float("nan")), pb.Logprobs(logprob=-1.0, top_token_ids=[1, 2], top_logprobs=[-1.0])]
)
def test_log_probabilities_that_are_none_break_the_protocol(entry: pb.Logprobs) -> None:
    with pytest.raises(wire.ProtocolError, match="a log probability is not a number, or"):
        wire.Codec().decode(result_message(logprobs=[entry]))


def test_log_probabilities_beside_columns_of_unequal_length_break_the_protocol() -> None:
    with pytest.raises(wire.ProtocolError, match="columns of unequal length"):
        wire.Codec().decode(result_message(num_sampled=[1], logprobs=[pb.Logprobs(logprob=-1.0)]))


def test_a_fault_of_a_later_protocol_is_an_error_of_the_sequence() -> None:
    fault = pb.Fault(sequence_id=12)
    fault.fault = 9  # type: ignore[assignment]
    assert wire.Codec().decode(result_message(faults=[fault])).faults == {12: Fault(SequenceFault.ERROR, "fault 9")}


def test_what_an_executor_says_of_itself() -> None:
    message = pb.DescribeResponse(
        name="x",
        model="m",
        tokenizer_digest="d",
        vocab_size=9,
        max_model_len=8,
        block_size=4,
        num_blocks=3,
        max_num_seqs=2,
        max_num_batched_tokens=16,
        pipeline_depth=2,
        device="cpu",
        epoch=41,
        version="1",
    )
    facts = wire.facts(message)
    assert facts.description == ExecutorDescription("x", "m", 4, 3, 8, 2, 16, 2)
    assert (facts.tokenizer_digest, facts.vocab_size, facts.device, facts.epoch, facts.version) == ("d", 9, "cpu", 41, "1")
    message.block_groups.add()
    message.block_groups.add(sliding_window=512, sinks=4)
    assert wire.facts(message).description.block_groups == (BlockGroup(), BlockGroup(512, 4))
    message.num_host_blocks = 7
    assert wire.facts(message).description.num_host_blocks == 7
    for name in ("a\0b", "x" * 257):
        for changes in (pb.DescribeResponse(name=name), pb.DescribeResponse(model=name)):
            named = pb.DescribeResponse()
            named.CopyFrom(message)
            named.MergeFrom(changes)
            with pytest.raises(wire.ProtocolError, match="name or model is not of at most 256 printable characters"):
                wire.facts(named)
    message.epoch = 2**63 - 1
    with pytest.raises(wire.ProtocolError, match="start it again"):
        wire.facts(message)
    message.block_size = 0
    message.name = ""
    with pytest.raises(wire.ProtocolError, match="without name, block_size"):
        wire.facts(message)


def test_the_tokenizer_files_are_joined_in_order() -> None:
    pieces = [pb.GetTokenizerResponse(name=name, content=content) for name, content in [("a", b"1"), ("b", b"x"), ("a", b"2")]]
    assert wire.tokenizer_files(pieces) == {"a": b"12", "b": b"x"}
