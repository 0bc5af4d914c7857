"""Protobuf in, records out, and back: the only place that knows both.

Must not know: the engine, streams. `decode_plan` checks what holds for a plan as a whole; what is wrong with one sequence is left
to the engine, which answers it for that sequence alone.
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenmill.executor.v1 import executor_pb2 as pb

from tokenmill_executor.records import Admission, Blocks, Plan, Result, Standing
from tokenmill_executor.runner import SampledLogprobs, SamplingParams


class BadPlan(Exception):
    """A plan that cannot be carried out at all; the text begins with the field at fault."""


@dataclass(frozen=True, slots=True)
class PlanLimits:
    max_num_seqs: int
    max_num_batched_tokens: int


@dataclass(frozen=True, slots=True)
class ServiceTimes:
    """Seconds from a plan's arrival to its start, and how long the engine had had nothing to do when it arrived."""

    queue_s: float
    idle_s: float


def decode_plan(message: pb.Plan, epoch: int, plan_id: int, limits: PlanLimits) -> Plan:
    """Raises BadPlan unless it is the plan of this epoch and number, within the limits."""
    if message.epoch != epoch:
        raise BadPlan(f"plan.epoch is {message.epoch}, this stream's is {epoch}")
    if message.plan_id != plan_id:
        raise BadPlan(f"plan.plan_id is {message.plan_id}, the next is {plan_id}")
    sequence_ids = list(message.advance_sequence_ids)
    max_tokens = list(message.advance_max_tokens)
    if len(max_tokens) != len(sequence_ids):
        raise BadPlan(f"plan.advance_max_tokens has {len(max_tokens)} entries, advance_sequence_ids {len(sequence_ids)}")
    if len(sequence_ids) > limits.max_num_seqs:
        raise BadPlan(f"plan.advance_sequence_ids has {len(sequence_ids)} entries, max_num_seqs is {limits.max_num_seqs}")
    if len(set(sequence_ids)) != len(sequence_ids):
        raise BadPlan("plan.advance_sequence_ids names a sequence twice")
    if sum(max_tokens) > limits.max_num_batched_tokens:
        raise BadPlan(
            f"plan.advance_max_tokens adds up to {sum(max_tokens)}, max_num_batched_tokens is {limits.max_num_batched_tokens}"
        )
    admit = [_decode_admission(index, admission) for index, admission in enumerate(message.admit)]
    max_steps = max(1, message.max_steps)
    return Plan(epoch, plan_id, list(message.release), admit, sequence_ids, max_tokens, max_steps, message.after_all_steps)


def _decode_admission(index: int, message: pb.Admission) -> Admission:
    sampling = message.sampling
    if len(sampling.logit_bias_ids) != len(sampling.logit_bias_values):
        raise BadPlan(f"plan.admit[{index}].sampling.logit_bias_values differs in length from logit_bias_ids")
    params = SamplingParams(
        max_tokens=sampling.max_tokens,
        seed=sampling.seed,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        logit_bias=tuple(zip(sampling.logit_bias_ids, sampling.logit_bias_values, strict=True)),
        min_tokens=sampling.min_tokens,
        stop_token_ids=tuple(sampling.stop_token_ids),
        ignore_eos=sampling.ignore_eos,
        logprobs=sampling.logprobs if sampling.HasField("logprobs") else None,
    )
    token_ids, num_prompt_tokens = list(message.token_ids), message.num_prompt_tokens
    return Admission(message.sequence_id, token_ids, num_prompt_tokens, params, message.cache_salt, message.fork_of)


def encode_result(result: Result, times: ServiceTimes) -> pb.RunResponse:
    # Filled in place: a message that is given to another is copied.
    response = pb.RunResponse()
    message = response.result
    message.epoch, message.plan_id, message.num_steps = result.epoch, result.plan_id, result.num_steps
    message.sequence_ids.extend(result.sequence_ids)
    message.num_computed.extend(result.num_computed)
    message.num_sampled.extend(result.num_sampled)
    message.token_ids.extend(result.token_ids)
    # The numbers of SequenceFinish and SequenceFault are the enums'.
    message.finishes.extend(result.finishes)  # type: ignore[arg-type]
    message.num_cached.extend(result.num_cached)
    message.dropped.extend(result.prefix.dropped)
    message.stored.extend(result.prefix.stored)
    message.stored_parents.extend(result.prefix.parents)
    for logprobs in result.logprobs:
        _add_logprobs(message, logprobs)
    for fault in result.faults:
        message.faults.add(sequence_id=fault.sequence_id, fault=int(fault.fault), detail=fault.detail)
    _fill_blocks(message.blocks, result.blocks)
    spent = message.times
    spent.queue_us, spent.idle_us = _microseconds(times.queue_s), _microseconds(times.idle_s)
    spent.prepare_us, spent.forward_us = _microseconds(result.times.prepare_s), _microseconds(result.times.forward_s)
    spent.sample_us = _microseconds(result.times.sample_s)
    return response


def encode_welcome(epoch: int, standing: Standing) -> pb.RunResponse:
    response = pb.RunResponse()
    welcome = response.welcome
    welcome.epoch = epoch
    _fill_blocks(welcome.blocks, standing.blocks)
    welcome.stored.extend(standing.prefix.stored)
    welcome.stored_parents.extend(standing.prefix.parents)
    return response


def _fill_blocks(message: pb.Blocks, blocks: Blocks) -> None:
    message.free, message.cached, message.held = blocks.free, blocks.cached, blocks.held


def _add_logprobs(message: pb.Result, logprobs: SampledLogprobs) -> None:
    message.logprobs.add(
        logprob=logprobs.logprob,
        top_token_ids=[token_id for token_id, _ in logprobs.top],
        top_logprobs=[logprob for _, logprob in logprobs.top],
    )


def _microseconds(seconds: float) -> int:
    return min(int(seconds * 1e6), 2**32 - 1)
