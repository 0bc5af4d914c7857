"""The plan protocol's messages to and from the core's records. Protobuf of `tokenmill.executor.v1` stops here.

Columns go over whole, without a Python object a sequence. Must not know: connections, requests, the ledger.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import isnan

from tokenmill.executor.v1 import executor_pb2 as pb

from tokenmill_scheduler.core.plans import (
    FULL_ATTENTION,
    MAX_EPOCH,
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

# Words of features, and the one way of hashing blocks that the core knows.
PREFIX_CACHING = "prefix_caching"
MULTI_STEP = "multi_step"
HASH_ALGORITHM = "sha256"
# Names are stored and shown.
MAX_NAME_CHARS = 256


class ProtocolError(Exception):
    """An executor sent what the plan protocol does not allow."""


@dataclass(frozen=True, slots=True)
class ExecutorFacts:
    """What an executor says of itself: for the core, for clients and for operators. `epoch` is the highest it has seen."""

    description: ExecutorDescription
    tokenizer_digest: str
    vocab_size: int
    device: str
    epoch: int
    version: str


@dataclass(frozen=True, slots=True)
class Standing:
    """What an epoch begins with: the executor's blocks, and hashes of those in its prefix cache, as far as it has told yet."""

    blocks: Blocks
    stored: tuple[int, ...] = ()


class Codec:
    """Encodes the plans and decodes the results of one epoch.

    A result's log probabilities are a flat column over the sequences that asked for them, so the codec keeps which those are.
    """

    def __init__(self) -> None:
        self._with_logprobs: set[int] = set()
        self._releases: dict[int, tuple[int, ...]] = {}

    def encode(self, plan: Plan) -> pb.RunRequest:
        # Filled in place: a message that is given to another is copied, and with it the prompts.
        request = pb.RunRequest()
        message = request.plan
        message.epoch, message.plan_id = plan.epoch, plan.plan_id
        message.release.extend(plan.release)
        for admission in plan.admit:
            self._add_admission(message, admission)
        message.advance_sequence_ids.extend(plan.advance_sequence_ids)
        message.advance_max_tokens.extend(plan.advance_max_tokens)
        message.max_steps, message.after_all_steps = plan.max_steps, plan.after_all_steps
        if plan.release and self._with_logprobs:
            self._releases[plan.plan_id] = plan.release
        return request

    def decode(self, message: pb.Result) -> Result:
        """Raises ProtocolError when columns do not fit together."""
        sequence_ids, num_sampled, token_ids = tuple(message.sequence_ids), tuple(message.num_sampled), tuple(message.token_ids)
        num_computed, num_cached, finishes = tuple(message.num_computed), tuple(message.num_cached), tuple(message.finishes)
        rows = len(sequence_ids)
        fits = rows == len(num_sampled) == len(num_computed) == len(num_cached or num_computed) == len(finishes)
        if not fits or sum(num_sampled) != len(token_ids):
            raise ProtocolError(f"result {message.plan_id} has columns of unequal length")
        result = Result(
            epoch=message.epoch,
            plan_id=message.plan_id,
            sequence_ids=sequence_ids,
            num_computed=num_computed,
            num_sampled=num_sampled,
            token_ids=token_ids,
            finishes=finishes,
            blocks=blocks(message.blocks),
            faults={fault.sequence_id: _fault(fault) for fault in message.faults},
            logprobs=self._logprobs(message),
            times=_times(message.times),
            num_cached=num_cached,
            dropped=tuple(message.dropped),
            stored=tuple(message.stored),
            num_steps=max(1, message.num_steps),
        )
        self._with_logprobs.difference_update(self._releases.pop(result.plan_id, ()))
        if self._with_logprobs:
            self._with_logprobs.difference_update(_ended(result))
        return result

    def _add_admission(self, message: pb.Plan, admission: Admission) -> None:
        message.admit.add(
            sequence_id=admission.sequence_id,
            token_ids=admission.token_ids,
            num_prompt_tokens=admission.num_prompt_tokens,
            sampling=_sampling(admission.sampling),
            cache_salt=admission.cache_salt,
            fork_of=admission.fork_of,
        )
        if admission.sampling.logprobs is not None:
            self._with_logprobs.add(admission.sequence_id)

    def _logprobs(self, message: pb.Result) -> dict[int, tuple[TokenLogprobs, ...]]:
        if not message.logprobs:
            return {}
        entries = [_token_logprobs(entry) for entry in message.logprobs]
        by_row: dict[int, tuple[TokenLogprobs, ...]] = {}
        at = 0
        for row, (sequence_id, count) in enumerate(zip(message.sequence_ids, message.num_sampled, strict=True)):
            if count and sequence_id in self._with_logprobs:
                by_row[row] = tuple(entries[at : at + count])
                at += count
        if at != len(entries):
            raise ProtocolError(f"result {message.plan_id} has {len(entries)} log probabilities where {at} were asked for")
        return by_row


def _ended(result: Result) -> list[int]:
    """The sequences that the executor has let go by itself."""
    finished = [sequence_id for sequence_id, finish in zip(result.sequence_ids, result.finishes, strict=True) if finish]
    return finished + [sequence_id for sequence_id, fault in result.faults.items() if fault.fault is not SequenceFault.NO_BLOCKS]


def standing(message: pb.Welcome) -> Standing:
    return Standing(blocks(message.blocks), tuple(message.stored))


def blocks(message: pb.Blocks) -> Blocks:
    return Blocks(free=message.free, cached=message.cached, held=message.held)


def facts(message: pb.DescribeResponse) -> ExecutorFacts:
    """Raises ProtocolError when a limit that planning needs is missing or zero, a name or an epoch cannot be kept."""
    limits = ("block_size", "num_blocks", "max_model_len", "max_num_seqs", "max_num_batched_tokens", "pipeline_depth")
    missing = [name for name in ("name", "model", "vocab_size", *limits) if not getattr(message, name)]
    if missing:
        raise ProtocolError(f"the executor describes itself without {', '.join(missing)}")
    if not all(name.isprintable() and len(name) <= MAX_NAME_CHARS for name in (message.name, message.model)):
        raise ProtocolError(f"the executor's name or model is not of at most {MAX_NAME_CHARS} printable characters")
    if message.epoch >= MAX_EPOCH:
        raise ProtocolError(f"the executor has seen epoch {message.epoch}, which leaves no higher one: start it again")
    return ExecutorFacts(
        description=ExecutorDescription(
            name=message.name,
            model=message.model,
            **{name: getattr(message, name) for name in limits},
            caches_prefixes=PREFIX_CACHING in message.features,
            cache_version=message.cache_version if message.prefix_caching_hash_algo == HASH_ALGORITHM else None,
            num_host_blocks=message.num_host_blocks,
            multi_step=MULTI_STEP in message.features,
            block_groups=tuple(BlockGroup(g.sliding_window, g.sinks) for g in message.block_groups) or FULL_ATTENTION,
        ),
        tokenizer_digest=message.tokenizer_digest,
        vocab_size=message.vocab_size,
        device=message.device,
        epoch=message.epoch,
        version=message.version,
    )


def tokenizer_files(pieces: Iterable[pb.GetTokenizerResponse]) -> dict[str, bytes]:
    """Joins the pieces of each file, in order."""
    parts: dict[str, list[bytes]] = {}
    for piece in pieces:
        parts.setdefault(piece.name, []).append(piece.content)
    return {name: b"".join(contents) for name, contents in parts.items()}


def _sampling(sampling: Sampling) -> pb.Sampling:
    return pb.Sampling(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        logit_bias_ids=[token_id for token_id, _ in sampling.logit_bias],
        logit_bias_values=[value for _, value in sampling.logit_bias],
        seed=sampling.seed,
        max_tokens=sampling.max_tokens,
        min_tokens=sampling.min_tokens,
        stop_token_ids=sampling.stop_token_ids,
        ignore_eos=sampling.ignore_eos,
        logprobs=sampling.logprobs,
    )


def _fault(message: pb.Fault) -> Fault:
    try:
        return Fault(SequenceFault(message.fault), message.detail)
    except ValueError:
        # A fault of a later protocol: what we can rely on is that the sequence was released.
        return Fault(SequenceFault.ERROR, message.detail or f"fault {message.fault}")


def _token_logprobs(message: pb.Logprobs) -> TokenLogprobs:
    if len(message.top_token_ids) != len(message.top_logprobs) or isnan(message.logprob):
        raise ProtocolError("a log probability is not a number, or the most likely tokens have columns of unequal length")
    return TokenLogprobs(message.logprob, tuple(zip(message.top_token_ids, message.top_logprobs, strict=True)))


def _times(message: pb.Times) -> StepTimes:
    return StepTimes(
        queue_us=message.queue_us,
        prepare_us=message.prepare_us,
        forward_us=message.forward_us,
        sample_us=message.sample_us,
        idle_us=message.idle_us,
    )
