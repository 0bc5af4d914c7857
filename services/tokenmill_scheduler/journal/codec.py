"""Records of the core as JSON values and back: every field by its type, so that a new event needs no code here.

A record is an object with the fields that differ from their defaults. Events and effects also say their type. Raises TypeError for
a record with a field of a kind that is not known here. Must not know: files, what the records mean.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from enum import Enum
from functools import cache
from typing import Any, Union, get_args, get_origin, get_type_hints

from tokenmill_scheduler.core.effects import Effect
from tokenmill_scheduler.core.events import Event

Json = Any
Convert = Callable[[Any], Any]
_PLAIN = (int, str, bool)


class CodecError(ValueError):
    """A value that is no record of this release."""


def encode(record: Event | Effect) -> dict[str, Json]:
    return {"type": type(record).__name__, **encode_fields(record)}


def decode(value: Mapping[str, Json]) -> Event | Effect:
    """Raises CodecError."""
    rest = dict(value)
    try:
        record_type = types_by_name()[rest.pop("type")]
    except KeyError as error:
        raise CodecError(f"{error} is no event or effect of this release") from error
    record: Event | Effect = decode_fields(record_type, rest)
    return record


def encode_fields(record: Any) -> dict[str, Json]:
    """Of any frozen record."""
    encoded = {}
    for name, default, convert, _ in _shape(type(record)):
        value = getattr(record, name)
        if value != default:
            encoded[name] = convert(value)
    return encoded


def decode_fields(record_type: type[Any], value: Mapping[str, Json]) -> Any:
    """Raises CodecError."""
    converters = {name: convert for name, _, _, convert in _shape(record_type)}
    try:
        return record_type(**{name: converters[name](part) for name, part in value.items()})
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CodecError(f"no {record_type.__name__} of this release: {error}") from error


@cache
def types_by_name() -> dict[str, type[Any]]:
    """Every event and effect of the core."""
    return {record_type.__name__: record_type for record_type in (*get_args(Event), *get_args(Effect))}


_Shape = tuple[tuple[str, Any, Convert, Convert], ...]
_SHAPES: dict[type[Any], _Shape] = {}


def _shape(record_type: type[Any]) -> _Shape:
    """Of each field: name, default, to JSON, from JSON. Worked out once for each type."""
    shape = _SHAPES.get(record_type)
    if shape is None:
        hints = get_type_hints(record_type)
        shape = tuple([(f.name, _default(f), *_converters(hints[f.name])) for f in fields(record_type)])
        _SHAPES[record_type] = shape
    return shape


def _default(field: Field[Any]) -> Any:
    if field.default_factory is not MISSING:
        return field.default_factory()
    return field.default


def _same(value: Any) -> Any:
    return value


def _converters(hint: Any) -> tuple[Convert, Convert]:
    """To JSON and from JSON."""
    origin, arguments = get_origin(hint), get_args(hint)
    if hint in _PLAIN:
        return _same, _same
    if hint is float:
        return float, float
    if isinstance(hint, type) and issubclass(hint, Enum):
        return (lambda value: value.value), hint
    if is_dataclass(hint):
        return encode_fields, lambda value: decode_fields(hint, value)  # type: ignore[arg-type]
    if origin in (Union, types.UnionType):
        return _optional(hint, arguments)
    if origin is tuple:
        return _tuple(arguments)
    if origin in (Mapping, dict):
        return _mapping(*arguments)
    raise TypeError(f"no way to write {hint} as JSON: see {__name__}")


def _optional(hint: Any, arguments: tuple[Any, ...]) -> tuple[Convert, Convert]:
    kinds = [argument for argument in arguments if argument is not types.NoneType]
    if len(kinds) != 1:
        raise TypeError(f"no way to tell the kinds of {hint} apart in JSON: see {__name__}")
    to_json, from_json = _converters(kinds[0])
    return _unless_none(to_json), _unless_none(from_json)


def _unless_none(convert: Convert) -> Convert:
    return convert if convert is _same else lambda value: None if value is None else convert(value)


def _tuple(arguments: tuple[Any, ...]) -> tuple[Convert, Convert]:
    """As a list: of any length and one kind, or of a kind for each place."""
    if arguments[1:] == (Ellipsis,):
        to_json, from_json = _converters(arguments[0])
        if to_json is _same:
            # The columns of a step: json writes a tuple as it is.
            return _same, tuple
        return (lambda value: [to_json(part) for part in value]), (lambda value: tuple([from_json(part) for part in value]))
    pairs = [_converters(argument) for argument in arguments]
    return (
        lambda value: [to_json(part) for (to_json, _), part in zip(pairs, value, strict=True)],
        lambda value: tuple([from_json(part) for (_, from_json), part in zip(pairs, value, strict=True)]),
    )


def _mapping(key: Any, kind: Any) -> tuple[Convert, Convert]:
    """As a list of pairs, for keys need not be text."""
    key_to_json, key_from_json = _converters(key)
    to_json, from_json = _converters(kind)
    return (
        lambda value: [[key_to_json(name), to_json(part)] for name, part in value.items()],
        lambda value: {key_from_json(name): from_json(part) for name, part in value},
    )
