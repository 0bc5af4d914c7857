"""What the client hands out: frozen records; those for operators are in `admin_records.py`. Must not know: protobuf, gRPC."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import TypeVar

E = TypeVar("E", bound=StrEnum)


def named(kind: type[E], word: str) -> E:
    """The member of this name, in upper or lower case. Raises ValueError, which names them all."""
    try:
        return kind(word.strip().lower().replace("-", "_"))
    except ValueError:
        raise ValueError(f"{word!r} is none of {', '.join(kind)}") from None


class RequestState(StrEnum):
    """Where a request stands; meanings as in `tokenmill.inference.v1.RequestState`."""

    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"
    PREEMPTED = "preempted"
    DONE = "done"
    CANCELLED = "cancelled"
    EXPIRED = "expired"
    FAILED = "failed"

    @property
    def ended(self) -> bool:
        return self in _ENDED


_ENDED = frozenset({RequestState.DONE, RequestState.CANCELLED, RequestState.EXPIRED, RequestState.FAILED})


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    EXPIRED = "expired"
    ERROR = "error"


class Lane(StrEnum):
    """Quality of service: real-time runs before standard, standard before batch."""

    REAL_TIME = "real_time"
    STANDARD = "standard"
    BATCH = "batch"


@dataclass(frozen=True, slots=True)
class Usage:
    """`cached_tokens` are those of the prompt that were not computed: cached, or shared with another choice."""

    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """`top` has (token id, log probability) pairs, most likely first."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


# ---- a stream's events ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Accepted:
    request_id: str
    prompt_tokens: int
    num_choices: int = 1


@dataclass(frozen=True, slots=True)
class Delta:
    """Output tokens `first_index` to `first_index + token_count - 1`, or text alone that was held back until the request's end.

    `token_ids` and `text` are empty unless asked for; `logprobs` is empty or has one entry a token. `choice` counts from 0.
    """

    first_index: int
    token_count: int
    token_ids: tuple[int, ...] = ()
    text: str = ""
    logprobs: tuple[TokenLogprobs, ...] = ()
    choice: int = 0


@dataclass(frozen=True, slots=True)
class Finished:
    state: RequestState
    finish_reason: FinishReason | None
    usage: Usage
    error: str = ""
    error_code: int = 0
    choice: int = 0


StreamEvent = Accepted | Delta | Finished


@dataclass(frozen=True, slots=True)
class Output:
    """What a stream has brought of one choice, from output token `first_index` on. `finish_reason` is None while it goes on."""

    request_id: str
    first_index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    finish_reason: FinishReason | None
    usage: Usage
    choice: int = 0


# ---- answers -------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Submitted:
    """`joined`: the request existed already, with an equal payload."""

    request_id: str
    prompt_tokens: int
    joined: bool


@dataclass(frozen=True, slots=True)
class Cancellation:
    """`already_ended`: the request had ended before the call, which changed nothing. Of several choices `state` is CANCELLED when
    one of them is, else that of the first.
    """

    state: RequestState
    already_ended: bool


@dataclass(frozen=True, slots=True)
class Tokenized:
    """`max_model_len` is the most tokens a prompt and its output may have together."""

    token_ids: tuple[int, ...]
    max_model_len: int


@dataclass(frozen=True, slots=True)
class Model:
    name: str
    max_model_len: int
    vocab_size: int
    tokenizer_digest: str
    has_chat_template: bool
    executors: int


@dataclass(frozen=True, slots=True)
class RequestInfo:
    """Where a request stands; `wait_reason` says why it was in no plan of the last step. Times are UTC."""

    request_id: str
    model: str
    tenant: str
    state: RequestState
    finish_reason: FinishReason | None
    error: str
    priority: int
    usage: Usage
    submitted_at: datetime | None
    first_token_at: datetime | None
    finished_at: datetime | None
    deadline: datetime | None
    preemptions: int
    detached: bool
    wait_reason: str
    executor: str
    lane: Lane
    retry_of: str
    # Choices asked for, and which of them this is; `parent_id` is the first one's id, which is that of the request.
    n: int = 1
    choice: int = 0
    parent_id: str = ""
    # `wait_reason` as a word to count by, such as "no_slot".
    wait_code: str = ""


@dataclass(frozen=True, slots=True)
class ChoiceSnapshot:
    """One of several choices, numbered as streams do: with `best_of` above `n`, the best is 0. `info.request_id` names it alone."""

    choice: int
    info: RequestInfo
    output_token_ids: tuple[int, ...]
    output_text: str


@dataclass(frozen=True, slots=True)
class RequestSnapshot:
    """A request with its output so far, if that was asked for; of several choices, that of the first of `choices`.

    `choices` are those that are given out: with `best_of` above `n` none before all have ended, then the best.
    """

    info: RequestInfo
    output_token_ids: tuple[int, ...]
    output_text: str
    choices: tuple[ChoiceSnapshot, ...] = ()
