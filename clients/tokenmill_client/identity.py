"""Request ids: unique without asking anyone, and in the order of their making."""

from __future__ import annotations

import secrets
import time

# Crockford's base 32: no letters that read as digits.
_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"


def new_request_id() -> str:
    """`req-` and 26 characters: 48 bits of milliseconds, then 80 random ones (as ULID has them)."""
    number = time.time_ns() // 1_000_000 << 80 | secrets.randbits(80)
    return "req-" + "".join(_ALPHABET[number >> shift & 31] for shift in range(125, -1, -5))
