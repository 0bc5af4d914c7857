"""Every event and effect of the core comes back from JSON as it was, whatever is in it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenmill_scheduler.core.effects import Effect
from tokenmill_scheduler.core.events import Cancelled, Event, ExecutorLost
from tokenmill_scheduler.core.scheduler import SchedulerConfig
from tokenmill_scheduler.journal.codec import CodecError, decode, decode_fields, encode, encode_fields, types_by_name

RECORDS = (*get_args(Event), *get_args(Effect))


def values(hint: Any) -> st.SearchStrategy[Any]:
    """Anything that a field of this type may hold; a kind not known here fails the test, as it should the codec."""
    origin, arguments = get_origin(hint), get_args(hint)
    simple: dict[Any, st.SearchStrategy[Any]] = {
        int: st.integers(-(2**70), 2**70),
        str: st.text(max_size=5),
        bool: st.booleans(),
        float: st.floats(allow_nan=False),
        NoneType: st.none(),
    }
    if hint in simple:
        return simple[hint]
    if isinstance(hint, type) and issubclass(hint, Enum):
        return st.sampled_from(hint)
    if is_dataclass(hint):
        return records(hint)
    if origin in (Union, UnionType):
        return st.one_of([values(argument) for argument in arguments])
    if origin is tuple and arguments[1:] == (Ellipsis,):
        return st.lists(values(arguments[0]), max_size=3).map(tuple)
    if origin is tuple:
        return st.tuples(*[values(argument) for argument in arguments])
    if origin in (Mapping, dict):
        return st.dictionaries(*[values(argument) for argument in arguments], max_size=3)
    raise AssertionError(f"the core's records have a new kind of field: {hint}")


def records(record_type: Any) -> st.SearchStrategy[Any]:
    hints = get_type_hints(record_type)
    return st.builds(record_type, **{field.name: values(hints[field.name]) for field in fields(record_type)})


@pytest.mark.parametrize("record_type", RECORDS, ids=lambda record_type: record_type.__name__)
@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_round_trip(record_type: Any, data: st.DataObject) -> None:
    record = data.draw(records(record_type))
    text = json.dumps(encode(record))
    back = decode(json.loads(text))
    assert back == record
    assert type(back) is record_type
    assert json.dumps(encode(back)) == text


@given(records(SchedulerConfig))
@settings(max_examples=50, deadline=None)
def test_configurations_round_trip(config: SchedulerConfig) -> None:
    assert decode_fields(SchedulerConfig, json.loads(json.dumps(encode_fields(config)))) == config


def test_names_are_those_of_all_records() -> None:
    assert set(types_by_name()) == {record.__name__ for record in RECORDS}
    assert len({record.__name__ for record in RECORDS}) >= 16


def test_defaults_are_left_out() -> None:
    assert encode(ExecutorLost("x", 3, "gone")) == {"type": "ExecutorLost", "executor": "x", "epoch": 3, "reason": "gone"}


@dataclass(frozen=True)
class Odd:
    """With a field that JSON has no form for."""

    things: frozenset[int] = frozenset()


def test_a_record_that_json_cannot_hold_is_refused() -> None:
    with pytest.raises(TypeError, match="no way to write"):
        encode_fields(Odd())


@pytest.mark.parametrize(
    "value",
    [
        {"type": "Abducted", "request_id": "r"},
        {"request_id": "r"},
        {"type": "Cancelled", "request_id": "r"},
        {"type": "Cancelled", "request_id": "r", "reason": "", "colour": "red"},
        {"type": "Submitted", "request": {"request_id": "r"}},
    ],
)
def test_what_another_release_wrote_is_refused(value: Any) -> None:
    with pytest.raises(CodecError, match="of this release"):
        decode(value)


def test_a_known_event() -> None:
    assert decode({"type": "Cancelled", "request_id": "r", "reason": "why"}) == Cancelled("r", "why")
