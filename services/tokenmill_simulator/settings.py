"""Settings of the core out of words: `FIELD=VALUE`, or `FIELD.KEY=VALUE` for a part of one.

    watermark=0.05   fair_share=yes   lane_shares.batch=20   weights.tenant-1=3   overload.queue_delay_s=5

What is not named stays as it is. Must not know: where words come from.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from math import isfinite, nan
from typing import Any, get_type_hints

from tokenmill_scheduler.core.admission import ADMISSION_MODES
from tokenmill_scheduler.core.batching import BATCHING_MODES
from tokenmill_scheduler.core.lanes import LaneShares, check_lane_shares
from tokenmill_scheduler.core.overload import OverloadConfig
from tokenmill_scheduler.core.policy import POLICIES
from tokenmill_scheduler.core.request import Lane
from tokenmill_scheduler.core.scheduler import SchedulerConfig


def configured(base: SchedulerConfig, settings: Sequence[str]) -> SchedulerConfig:
    """The later of two words for one thing counts. Raises ValueError, which names the setting."""
    for setting in settings:
        name, _, text = setting.partition("=")
        field, _, key = name.partition(".")
        try:
            base = replace(base, **{field: _value(base, field, key, text)})
        except ValueError as error:
            raise ValueError(f"{setting!r}: {error}") from error
    try:
        check_lane_shares(base.lane_shares)
    except ValueError as error:
        raise ValueError(f"lane_shares.LANE: {error}") from error
    return base


def _value(base: SchedulerConfig, field: str, key: str, text: str) -> Any:
    if field in _PARTS and key:
        return _PARTS[field](getattr(base, field), key, text)
    if key or field not in _PLAIN:
        raise ValueError(f"there is no such setting; settings are {', '.join((*_PLAIN, *_PARTS_IN_WORDS))}")
    if text not in _WORDS.get(field, (text,)):
        raise ValueError(f"it is one of {', '.join(_WORDS[field])}")
    return _PARSERS[_PLAIN[field]](text)


def _lane_share(before: LaneShares, key: str, text: str) -> LaneShares:
    lanes = [lane.name.lower() for lane in Lane]
    if key not in lanes:
        raise ValueError(f"{key!r} is no lane; lanes are {', '.join(lanes)}")
    shares = list(before)
    shares[lanes.index(key)] = _whole(text)
    return shares[0], shares[1], shares[2]


def _weight(before: Mapping[str, float], key: str, text: str) -> dict[str, float]:
    weight = _number(text)
    if weight <= 0:
        raise ValueError("a weight is above 0")
    return {**before, key: weight}


def _overload(before: OverloadConfig, key: str, text: str) -> OverloadConfig:
    known = get_type_hints(OverloadConfig)
    if key not in known:
        raise ValueError(f"{key!r} is none of {', '.join(known)}")
    return replace(before, **{key: _PARSERS[known[key]](text)})


def _whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError("it is a whole number") from None


def _number(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = nan
    if not isfinite(number):
        raise ValueError("it is a number")
    return number


def _yes_or_no(text: str) -> bool:
    if text not in _BOOLS:
        raise ValueError("it is yes or no")
    return _BOOLS[text]


_BOOLS = {"yes": True, "true": True, "1": True, "no": False, "false": False, "0": False}
_PARSERS: dict[Any, Callable[[str], Any]] = {int: _whole, float: _number, str: str, bool: _yes_or_no}
_WORDS: dict[str, Sequence[str]] = {"policy": POLICIES, "batching": BATCHING_MODES, "admission": ADMISSION_MODES}
_PLAIN = {f.name: hint for f in fields(SchedulerConfig) if (hint := get_type_hints(SchedulerConfig)[f.name]) in _PARSERS}
_PARTS: dict[str, Callable[[Any, str, str], Any]] = {"lane_shares": _lane_share, "weights": _weight, "overload": _overload}
_PARTS_IN_WORDS = ("lane_shares.LANE", "weights.TENANT", *(f"overload.{field.name}" for field in fields(OverloadConfig)))
