"""RequestSpec of the protocol → Request of the core.

Must not know: the ledger, streams. Everything is checked before anything is refused, and nothing is stored before all has passed.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass

from google.protobuf.duration_pb2 import Duration
from tokenmill.inference.v1.inference_pb2 import Prompt, RequestSpec

from tokenmill_scheduler.core.request import Lane, Request
from tokenmill_scheduler.desk.port import Desk
from tokenmill_scheduler.desk.records import ServedModel
from tokenmill_scheduler.intake.fields import (
    LANE_WORDS,
    REQUEST_ID_WORDS,
    TENANT_WORDS,
    check_priority,
    is_lane,
    is_request_id,
    is_tenant,
)
from tokenmill_scheduler.intake.prompt import check_length, read_prompt
from tokenmill_scheduler.intake.sampling import Choices, Room, read_choices, read_sampling
from tokenmill_scheduler.intake.violations import InvalidArgument, Violations

MAX_TIMEOUT_S = 366 * 24 * 3600
MAX_CACHE_SALT_CHARS = 256

# Crockford's base 32, in order of their ASCII codes: ids sort as the numbers they are written from.
_DIGITS = "0123456789abcdefghjkmnpqrstvwxyz"
_ID_TIME_DIGITS, _ID_RANDOM_DIGITS = 10, 16


@dataclass(frozen=True, slots=True)
class Taken:
    """A request that passed, and what tells an equal payload under the same id from another."""

    request: Request
    payload_digest: bytes


class Intake:
    """`randbits(n)` draws n random bits, for seeds and ids that clients leave open; `clock` gives Unix seconds."""

    def __init__(
        self,
        desk: Desk,
        clock: Callable[[], float] = time.time,
        randbits: Callable[[int], int] = secrets.randbits,
        max_prompt_tokens: int | None = None,
    ) -> None:
        """`max_prompt_tokens` is this service's own limit beside the model's."""
        self._desk = desk
        self._max_prompt_tokens = max_prompt_tokens
        self._clock = clock
        self._randbits = randbits

    async def take(self, spec: RequestSpec, detached: bool) -> Taken:
        """Raises InvalidArgument with all that is wrong (field paths from `request` on), UnknownModel, Unavailable."""
        model = self._model(spec.model, "request.model")
        violations = Violations()
        _check_envelope(spec, violations)
        prompt = await read_prompt(spec.prompt, "request.prompt", model, violations)
        check_length(len(prompt), "request.prompt", model, self._max_prompt_tokens, violations)
        room = _room(len(prompt), model)
        sampling = read_sampling(spec.sampling, "request.sampling", model.vocab_size, room, lambda: self._randbits(63), violations)
        choices = read_choices(spec.sampling, "request.sampling", violations)
        if choices.best_of > 1:
            self._check_choices(choices, model, len(prompt), sampling.max_tokens, violations)
        violations.raise_any()
        now_s = self._clock()
        request = Request(
            request_id=spec.request_id or draw_request_id(now_s, self._randbits),
            model=model.name,
            prompt=tuple(prompt),
            sampling=sampling,
            arrival_s=now_s,
            priority=spec.priority,
            deadline_s=now_s + _seconds(spec.timeout) if spec.HasField("timeout") else None,
            tenant=spec.tenant or "default",
            detached=detached,
            cache_salt=spec.cache_salt,
            stop=tuple(dict.fromkeys(spec.sampling.stop)),
            include_stop=spec.sampling.include_stop_str_in_output,
            lane=Lane(spec.lane) if spec.lane else Lane.STANDARD,
            queue_deadline_s=now_s + _seconds(spec.queue_timeout) if spec.HasField("queue_timeout") else None,
            n=choices.n,
            best_of=choices.best_of,
            logprobs_hidden=choices.logprobs_hidden,
        )
        return Taken(request, digest_payload(spec, detached))

    async def tokenize(self, model_name: str, prompt: Prompt) -> tuple[ServedModel, list[int]]:
        """The prompt as `take` would read it, also one too long to run. Raises as `take`, field paths from `prompt` on."""
        model = self._model(model_name, "model")
        violations = Violations()
        token_ids = await read_prompt(prompt, "prompt", model, violations)
        violations.raise_any()
        return model, list(token_ids)

    def _check_choices(
        self, choices: Choices, model: ServedModel, num_prompt_tokens: int, max_tokens: int, violations: Violations
    ) -> None:
        """All are admitted together, so there must be an executor that can hold them."""
        most = self._desk.most_choices(model.name, max(num_prompt_tokens, 1), max(max_tokens, 1))
        if most is not None and choices.best_of > most:
            field = "best_of" if choices.best_of > choices.n else "n"
            words = f"no executor has room for more than {most} choices of this prompt at once; got {choices.best_of}"
            violations.add(f"request.sampling.{field}", words)

    def _model(self, name: str, field: str) -> ServedModel:
        if not name and len(models := self._desk.models()) > 1:
            names = ", ".join(sorted(model.name for model in models))
            raise InvalidArgument.of(field, f"must name one of the models served: {names}")
        return self._desk.model(name)


def draw_request_id(now_s: float, randbits: Callable[[int], int]) -> str:
    """`req-` and 26 characters that sort by time (as a ULID): 50 bits of milliseconds, then 80 random ones."""
    number = int(now_s * 1000) << (5 * _ID_RANDOM_DIGITS) | randbits(5 * _ID_RANDOM_DIGITS)
    digits = _ID_TIME_DIGITS + _ID_RANDOM_DIGITS
    return "req-" + "".join(_DIGITS[number >> (5 * place) & 31] for place in reversed(range(digits)))


def digest_payload(spec: RequestSpec, detached: bool) -> bytes:
    """SHA-256 of what the client sent but the id, and of whether it runs detached (Submit's do, whatever they say).

    Of what was sent, so that seeds and other defaults drawn here do not tell equal payloads apart. Serialisation with sorted map
    keys gives equal bytes in every process; fields are written in the order of their numbers, which never change.
    """
    sent = RequestSpec()
    sent.CopyFrom(spec)
    sent.ClearField("request_id")
    sent.detached = detached
    return hashlib.sha256(sent.SerializeToString(deterministic=True)).digest()


def _check_envelope(spec: RequestSpec, violations: Violations) -> None:
    violations.require(not spec.request_id or is_request_id(spec.request_id), "request.request_id", REQUEST_ID_WORDS)
    violations.require(not spec.tenant or is_tenant(spec.tenant), "request.tenant", TENANT_WORDS)
    check_priority(spec.priority, "request.priority", violations)
    for field in ("timeout", "queue_timeout"):
        valid = not spec.HasField(field) or 0 < _seconds(getattr(spec, field)) <= MAX_TIMEOUT_S
        violations.require(valid, f"request.{field}", "must be above 0 and at most 366 days")
    violations.require(not spec.lane or is_lane(spec.lane), "request.lane", LANE_WORDS)
    salt_words = f"must have at most {MAX_CACHE_SALT_CHARS} characters"
    violations.require(len(spec.cache_salt) <= MAX_CACHE_SALT_CHARS, "request.cache_salt", salt_words)


def _room(num_prompt_tokens: int, model: ServedModel) -> Room:
    """A client may ask for what the model's context leaves; one that asks for nothing gets no more than can run to its end.

    A prompt that leaves nothing is refused for that, and not also for a `max_tokens` that fits behind others.
    """
    left = model.max_model_len - num_prompt_tokens
    most = left if left >= 1 else model.max_model_len
    return Room(most=most, default=max(min(most, model.pool_tokens - num_prompt_tokens), 1))


def _seconds(duration: Duration) -> float:
    return duration.seconds + duration.nanos / 1e9
