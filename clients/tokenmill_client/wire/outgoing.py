"""Keyword arguments to the messages of calls; for operators' see `outgoing_admin.py`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

from tokenmill.inference.v1 import inference_pb2, types_pb2

from tokenmill_client.options import GenerateOptions, OutputForm, PromptForms, SubmitOptions
from tokenmill_client.records import Lane
from tokenmill_client.wire.fields import Field, lane_number

_SCALARS = frozenset(
    {
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
        "seed",
        "max_tokens",
        "min_tokens",
        "include_stop_str_in_output",
        "ignore_eos",
        "logprobs",
        "n",
        "best_of",
    }
)


def generate(prompt: str | None, output: OutputForm, options: GenerateOptions) -> inference_pb2.GenerateRequest:
    """Raises TypeError for an option there is not, and unless exactly one form of a prompt is given; InvalidRequest where a value
    does not fit the message.
    """
    _check_names(options, GenerateOptions)
    return inference_pb2.GenerateRequest(request=_request_spec(prompt, options), output=_output_options(output))


def submit(prompt: str | None, options: SubmitOptions) -> inference_pb2.SubmitRequest:
    """Raises as `generate` does."""
    _check_names(options, SubmitOptions)
    return inference_pb2.SubmitRequest(request=_request_spec(prompt, options))


def attach(request_id: str, next_indexes: Sequence[int], output: OutputForm) -> inference_pb2.AttachRequest:
    """From these indexes on, one for each choice, or one for all there may be. Raises InvalidRequest where one is no index."""
    message = inference_pb2.AttachRequest(request_id=request_id, output=_output_options(output))
    with Field("next_index"):
        if len(next_indexes) == 1:
            message.next_index = next_indexes[0]
        else:
            message.next_indexes.extend(next_indexes)
    return message


def get_request(request_id: str, include_output: bool) -> inference_pb2.GetRequestRequest:
    return inference_pb2.GetRequestRequest(request_id=request_id, include_output=include_output)


def cancel(request_id: str, reason: str) -> inference_pb2.CancelRequest:
    return inference_pb2.CancelRequest(request_id=request_id, reason=reason)


def tokenize(prompt: str | None, model: str, forms: PromptForms) -> inference_pb2.TokenizeRequest:
    """Raises as `generate` does."""
    _check_names(forms, PromptForms)
    return inference_pb2.TokenizeRequest(model=model, prompt=_prompt(prompt, forms))


def list_models() -> inference_pb2.ListModelsRequest:
    return inference_pb2.ListModelsRequest()


def _check_names(given: Mapping[str, object], options: Any) -> None:
    """`options` is a TypedDict, which only type checkers look at: a misspelt one must not pass in silence."""
    if unknown := given.keys() - options.__optional_keys__:
        raise TypeError(f"There is no option {', '.join(sorted(unknown))}.")


def _prompt(text: str | None, forms: PromptForms) -> inference_pb2.Prompt:
    messages, token_ids = forms.get("messages"), forms.get("token_ids")
    if sum(form is not None for form in (text, messages, token_ids)) != 1:
        raise TypeError("Give exactly one of a prompt text, messages and token_ids.")
    message = inference_pb2.Prompt()
    if text is not None:
        with Field("prompt.text"):
            message.text = text
    elif messages is not None:
        with Field("prompt.chat"):
            message.chat.SetInParent()
            message.chat.messages.extend(inference_pb2.ChatMessage(**turn) for turn in messages)
    elif token_ids is not None:
        with Field("prompt.token_ids"):
            message.token_ids.SetInParent()
            message.token_ids.ids.extend(token_ids)
    return message


def _request_spec(text: str | None, options: SubmitOptions) -> inference_pb2.RequestSpec:
    spec = inference_pb2.RequestSpec(prompt=_prompt(text, options), sampling=_sampling(options))
    for name in ("request_id", "model", "priority", "tenant", "detached", "cache_salt"):
        value = cast(Mapping[str, Any], options).get(name)
        if value is not None:
            with Field(name):
                setattr(spec, name, value)
    lane = options.get("lane")
    if lane is not None:
        with Field("lane"):
            spec.lane = lane_number(Lane(lane))
    for name, seconds in (("timeout", options.get("timeout")), ("queue_timeout", options.get("queue_timeout"))):
        if seconds is not None:
            with Field(name):
                getattr(spec, name).FromNanoseconds(round(seconds * 1e9))
    return spec


def _sampling(options: SubmitOptions) -> types_pb2.SamplingParams:
    params = types_pb2.SamplingParams()
    for name, value in options.items():
        if value is None:
            continue
        with Field(f"sampling.{name}"):
            if name in _SCALARS:
                setattr(params, name, value)
            elif name == "stop_token_ids":
                params.stop_token_ids.extend(cast("Iterable[int]", value))
            elif name == "stop":
                params.stop.extend([value] if isinstance(value, str) else cast("Iterable[str]", value))
            elif name == "logit_bias":
                params.logit_bias.update(cast("Mapping[int, float]", value))
    return params


def _output_options(form: OutputForm) -> inference_pb2.OutputOptions:
    return inference_pb2.OutputOptions(text=form != "token_ids", token_ids=form != "text")
