"""What may be asked of a request, as keyword arguments. Names and meanings are those of `tokenmill.inference.v1`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, TypedDict

from tokenmill_client.records import Lane

# What a stream carries.
OutputForm = Literal["text", "token_ids", "both"]
# A lane as a word.
LaneName = Literal["real_time", "standard", "batch"]


class Message(TypedDict):
    """One turn of a chat."""

    role: str
    content: str


class SamplingOptions(TypedDict, total=False):
    """How tokens are chosen. An absent one takes the server's default. `n` choices are made, or the `n` best of `best_of`."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float]
    seed: int
    max_tokens: int
    min_tokens: int
    stop_token_ids: Sequence[int]
    stop: str | Sequence[str]
    include_stop_str_in_output: bool
    ignore_eos: bool
    logprobs: int
    n: int
    best_of: int


class PromptForms(TypedDict, total=False):
    """The forms of a prompt other than text: exactly one of the three must be given."""

    messages: Sequence[Message]
    token_ids: Sequence[int]


class SubmitOptions(SamplingOptions, PromptForms, total=False):
    """`timeout` (seconds) is the request's: so long after it was accepted it ends as EXPIRED, with its tokens so far.

    `queue_timeout` (seconds) ends it likewise if it has not run by then.
    """

    request_id: str
    model: str
    priority: int
    lane: Lane | LaneName
    timeout: float
    queue_timeout: float
    tenant: str
    cache_salt: str


class GenerateOptions(SubmitOptions, total=False):
    """`detached` keeps the request running when no stream is attached to it."""

    detached: bool
