"""Between records and column values, without loss. Must not know: SQL, connections.

Token ids are packed little-endian u32. Log probabilities are, for each token: its own as f64, the number of alternatives as u32,
then for each alternative its id as u32 and its log probability as f64, all little-endian.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Sequence
from dataclasses import asdict, fields
from typing import Any

from tokenmill_scheduler.core.plans import BlockGroup, ExecutorDescription, TokenLogprobs
from tokenmill_scheduler.core.request import Request, Sampling

_LOGPROB = struct.Struct("<dI")
_ALTERNATIVE = struct.Struct("<Id")
# Of requests for several choices; requests stored by earlier releases have none.
_GROUP_FIELDS = ("n", "best_of", "logprobs_hidden")
_SAMPLING_FIELDS = tuple(field.name for field in fields(Sampling))
_DESCRIPTION_FIELDS = frozenset(field.name for field in fields(ExecutorDescription))


def pack_tokens(token_ids: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(token_ids)}I", *token_ids)


def unpack_tokens(blob: bytes) -> tuple[int, ...]:
    return struct.unpack(f"<{len(blob) // 4}I", blob)


def pack_logprobs(logprobs: Iterable[TokenLogprobs]) -> bytes:
    parts = []
    for entry in logprobs:
        parts.append(_LOGPROB.pack(entry.logprob, len(entry.top)))
        parts.extend(_ALTERNATIVE.pack(token_id, logprob) for token_id, logprob in entry.top)
    return b"".join(parts)


def unpack_logprobs(blob: bytes) -> tuple[TokenLogprobs, ...]:
    entries = []
    offset = 0
    while offset < len(blob):
        logprob, alternatives = _LOGPROB.unpack_from(blob, offset)
        start = offset + _LOGPROB.size
        offset = start + alternatives * _ALTERNATIVE.size
        entries.append(TokenLogprobs(logprob, tuple(_ALTERNATIVE.iter_unpack(blob[start:offset]))))
    return tuple(entries)


def pack_parameters(request: Request) -> str:
    """What the ledger stores but never searches by. ASCII only, so that any string a client sends fits any database."""
    return json.dumps(
        {
            "sampling": {name: getattr(request.sampling, name) for name in _SAMPLING_FIELDS},
            "stop": request.stop,
            "include_stop": request.include_stop,
            "cache_salt": request.cache_salt,
            **{name: getattr(request, name) for name in _GROUP_FIELDS},
        },
        separators=(",", ":"),
    )


def unpack_parameters(parameters: str) -> dict[str, Any]:
    """Keyword arguments for Request."""
    values = json.loads(parameters)
    sampling = values["sampling"]
    sampling["logit_bias"] = tuple((token_id, bias) for token_id, bias in sampling["logit_bias"])
    sampling["stop_token_ids"] = tuple(sampling["stop_token_ids"])
    return {**values, "sampling": Sampling(**sampling), "stop": tuple(values["stop"])}


def pack_description(description: ExecutorDescription) -> str:
    return json.dumps(asdict(description), separators=(",", ":"))


def unpack_description(text: str) -> ExecutorDescription:
    """Fields that only another release knows are passed over."""
    values = {name: value for name, value in json.loads(text).items() if name in _DESCRIPTION_FIELDS}
    return ExecutorDescription(**{**values, "block_groups": tuple([BlockGroup(**group) for group in values["block_groups"]])})


def clean(line: str) -> str:
    """Text for people (reasons, errors) as PostgreSQL can store it: it has no NUL character."""
    return line.replace("\0", "\ufffd")
