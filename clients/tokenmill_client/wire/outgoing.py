"""Keyword arguments and records to the messages of calls."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, cast

from google.protobuf.timestamp_pb2 import Timestamp
from tokenmill.admin.v1 import admin_pb2
from tokenmill.inference.v1 import inference_pb2, types_pb2

from tokenmill_client.errors import ErrorDetails, InvalidRequest
from tokenmill_client.options import GenerateOptions, OutputForm, PromptForms, SubmitOptions
from tokenmill_client.records import Lane, LaneShares, RequestFilter, RequestState, named

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

# ---- inference -----------------------------------------------------------------------------------------------------------------


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
    with _Field("next_index"):
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
        with _Field("prompt.text"):
            message.text = text
    elif messages is not None:
        with _Field("prompt.chat"):
            message.chat.SetInParent()
            message.chat.messages.extend(inference_pb2.ChatMessage(**turn) for turn in messages)
    elif token_ids is not None:
        with _Field("prompt.token_ids"):
            message.token_ids.SetInParent()
            message.token_ids.ids.extend(token_ids)
    return message


def _request_spec(text: str | None, options: SubmitOptions) -> inference_pb2.RequestSpec:
    spec = inference_pb2.RequestSpec(prompt=_prompt(text, options), sampling=_sampling(options))
    for name in ("request_id", "model", "priority", "tenant", "detached", "cache_salt"):
        value = cast(Mapping[str, Any], options).get(name)
        if value is not None:
            with _Field(name):
                setattr(spec, name, value)
    lane = options.get("lane")
    if lane is not None:
        with _Field("lane"):
            spec.lane = _lane(Lane(lane))
    for name, seconds in (("timeout", options.get("timeout")), ("queue_timeout", options.get("queue_timeout"))):
        if seconds is not None:
            with _Field(name):
                getattr(spec, name).FromNanoseconds(round(seconds * 1e9))
    return spec


def _lane(lane: Lane | str) -> types_pb2.Lane.ValueType:
    return types_pb2.Lane.Value(f"LANE_{named(Lane, lane).name}")


def _state(state: RequestState | str) -> types_pb2.RequestState.ValueType:
    return types_pb2.RequestState.Value(f"REQUEST_STATE_{named(RequestState, state).name}")


def _sampling(options: SubmitOptions) -> types_pb2.SamplingParams:
    params = types_pb2.SamplingParams()
    for name, value in options.items():
        if value is None:
            continue
        with _Field(f"sampling.{name}"):
            if name in _SCALARS:
                setattr(params, name, value)
            elif name == "stop_token_ids":
                params.stop_token_ids.extend(cast("Iterable[int]", value))
            elif name == "stop":
                params.stop.extend([value] if isinstance(value, str) else cast("Iterable[str]", value))
            elif name == "logit_bias":
                params.logit_bias.update(cast("Mapping[int, float]", value))
    return params


class _Field:
    """Turns protobuf's complaint about a value into an InvalidRequest that names the field."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, TypeError | ValueError | OverflowError):
            details = ErrorDetails(violations=((self._name, str(error)),))
            raise InvalidRequest(f"{self._name}: {error}", details=details) from error


def _output_options(form: OutputForm) -> inference_pb2.OutputOptions:
    return inference_pb2.OutputOptions(text=form != "token_ids", token_ids=form != "text")


# ---- admin ---------------------------------------------------------------------------------------------------------------------


def list_requests(
    condition: RequestFilter | None, page_size: int, page_token: str, oldest_first: bool, by_priority: bool
) -> admin_pb2.ListRequestsRequest:
    return admin_pb2.ListRequestsRequest(
        filter=_request_filter(condition),
        page_size=page_size,
        page_token=page_token,
        oldest_first=oldest_first,
        by_priority=by_priority,
    )


def get_request_life(request_id: str) -> admin_pb2.GetRequestRequest:
    return admin_pb2.GetRequestRequest(request_id=request_id)


def cancel_requests(
    request_ids: Sequence[str], condition: RequestFilter | None, reason: str, dry_run: bool
) -> admin_pb2.CancelRequestsRequest:
    return admin_pb2.CancelRequestsRequest(
        request_ids=request_ids, filter=_request_filter(condition), reason=reason, dry_run=dry_run
    )


def update_request(request_id: str, priority: int | None, deadline: datetime | None, reason: str) -> admin_pb2.UpdateRequestRequest:
    return admin_pb2.UpdateRequestRequest(
        request_id=request_id, priority=priority, deadline=None if deadline is None else _timestamp(deadline), reason=reason
    )


def retry_request(request_id: str, reason: str) -> admin_pb2.RetryRequestRequest:
    return admin_pb2.RetryRequestRequest(request_id=request_id, reason=reason)


def pause_queue(reason: str) -> admin_pb2.PauseQueueRequest:
    return admin_pb2.PauseQueueRequest(reason=reason)


def get_policy() -> admin_pb2.GetPolicyRequest:
    return admin_pb2.GetPolicyRequest()


def set_policy(
    policy: str | None, fair_share: bool | None, lane_shares: LaneShares | None, reason: str
) -> admin_pb2.SetPolicyRequest:
    request = admin_pb2.SetPolicyRequest(policy=policy or "", reason=reason)
    if fair_share is not None:
        request.fair_share = fair_share
    if lane_shares is not None:
        request.lane_shares.real_time = lane_shares.real_time
        request.lane_shares.standard = lane_shares.standard
        request.lane_shares.batch = lane_shares.batch
        # Also when all are 0.
        request.lane_shares.SetInParent()
    return request


def reset_policy(reason: str) -> admin_pb2.ResetPolicyRequest:
    return admin_pb2.ResetPolicyRequest(reason=reason)


def resume_queue(reason: str) -> admin_pb2.ResumeQueueRequest:
    return admin_pb2.ResumeQueueRequest(reason=reason)


def drain_executor(name: str, reason: str) -> admin_pb2.DrainExecutorRequest:
    return admin_pb2.DrainExecutorRequest(name=name, reason=reason)


def undrain_executor(name: str, reason: str) -> admin_pb2.UndrainExecutorRequest:
    return admin_pb2.UndrainExecutorRequest(name=name, reason=reason)


def list_actions(target: str, page_size: int, page_token: str) -> admin_pb2.ListActionsRequest:
    return admin_pb2.ListActionsRequest(target=target, page_size=page_size, page_token=page_token)


def list_executors() -> admin_pb2.ListExecutorsRequest:
    return admin_pb2.ListExecutorsRequest()


def get_load() -> admin_pb2.GetLoadRequest:
    return admin_pb2.GetLoadRequest()


def _request_filter(condition: RequestFilter | None) -> admin_pb2.RequestFilter | None:
    if condition is None:
        return None
    message = admin_pb2.RequestFilter(
        tenant=condition.tenant,
        min_priority=condition.min_priority,
        max_priority=condition.max_priority,
        model=condition.model,
    )
    with _Field("states"):
        message.states.extend([_state(state) for state in condition.states])
    with _Field("lanes"):
        message.lanes.extend([_lane(lane) for lane in condition.lanes])
    if condition.min_age is not None:
        message.min_age.FromNanoseconds(round(condition.min_age * 1e9))
    return message


def _timestamp(at: datetime) -> Timestamp:
    """A time without a zone is taken as local time."""
    message = Timestamp()
    message.FromDatetime(at.astimezone(UTC))
    return message
