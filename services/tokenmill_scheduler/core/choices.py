"""A request for several choices (`n`, `best_of`) is a group of requests: the first has the client's id, the others have made ones.

Each choice is a request of its own, with its own state, tokens and stream; they have the prompt and all parameters in common but
the seed. Pure. Must not know: executors, plans, the ledger.
"""

from __future__ import annotations

from dataclasses import replace

from tokenmill_scheduler.core.request import Request

MAX_CHOICES = 16
# Not allowed in an id that a client gives, so no choice can have another request's id.
SEPARATOR = "/"

_GOLDEN = 0x9E3779B97F4A7C15
_MASK = 0xFFFF_FFFF_FFFF_FFFF


def choice_id(request_id: str, choice: int) -> str:
    """The id of one choice of the request `request_id`; the first has that of the request itself."""
    return f"{request_id}{SEPARATOR}{choice}" if choice else request_id


def choice_seed(seed: int, choice: int) -> int:
    """Derived from (seed, choice) alone, 64 bits; the first choice samples with `seed` itself, as if it were alone.

    SplitMix64 (Steele, Lea and Flood 2014) as a hash of a counter, as executors make their random numbers: those of tokens count
    up from 1 with the position, those of choices count down from 0, so that none is used twice.
    """
    if choice == 0:
        return seed
    return _mix((_mix((seed + _GOLDEN) & _MASK) - choice * _GOLDEN) & _MASK)


def further_choices(request: Request) -> tuple[Request, ...]:
    """All choices of a request but itself, in order: none, unless it is the first of several."""
    if request.choice:
        return ()
    return tuple(
        replace(
            request,
            request_id=choice_id(request.request_id, choice),
            sampling=replace(request.sampling, seed=choice_seed(request.sampling.seed, choice)),
            parent=request.request_id,
            choice=choice,
        )
        for choice in range(1, request.best_of)
    )


def choice_ids(request: Request) -> tuple[str, ...]:
    """What a call that names this request is about: all its choices, or the one that it is."""
    if request.choice:
        return (request.request_id,)
    return tuple(choice_id(request.request_id, choice) for choice in range(request.best_of))


def _mix(value: int) -> int:
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & _MASK
    return value ^ (value >> 31)
