"""A prompt in any of its three forms becomes token ids."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from tokenmill.inference.v1.inference_pb2 import ChatMessages, Prompt

from tokenmill_scheduler.desk.records import ServedModel
from tokenmill_scheduler.intake.violations import Violations

# Tokenising this many characters takes about a millisecond; longer texts go to a thread, so that no stream waits for them.
_LONG_TEXT_CHARS = 2_000
# Threads of their own: reads of the ledger, which share asyncio's, must not wait for texts.
_TOKENISING = ThreadPoolExecutor(4, "tokenising")
# A megabyte takes about a second and 100 MB to tokenise. Texts beyond this are refused unread if no tokens would make them fit.
_ALWAYS_READ_CHARS = 1_000_000


async def read_prompt(prompt: Prompt, field: str, model: ServedModel, violations: Violations) -> Sequence[int]:
    """The prompt's token ids; empty when something is wrong with it, which then is in `violations`."""
    match prompt.WhichOneof("form"):
        case "text":
            token_ids = await _read_text(prompt.text, f"{field}.text", model, violations)
        case "chat":
            token_ids = await _read_chat(prompt.chat, f"{field}.chat", model, violations)
        case "token_ids":
            token_ids = prompt.token_ids.ids
            violations.require(len(token_ids) > 0, f"{field}.token_ids", "must not be empty")
        case _:
            violations.add(field, "must be given as text, chat or token_ids")
            return ()
    return _in_vocabulary(token_ids, f"{field}.{prompt.WhichOneof('form')}", model.vocab_size, violations)


def check_length(num_tokens: int, field: str, model: ServedModel, most: int | None, violations: Violations) -> None:
    """A prompt must leave room for one output token, in the model's context and in the largest KV pool; `most` may be less."""
    if most is not None and num_tokens > most:
        limit = f"this service takes {most} (--max-prompt-tokens)"
    elif num_tokens >= model.max_model_len:
        limit = f"the model takes {model.max_model_len} tokens with at least one of output"
    elif num_tokens >= model.pool_tokens:
        limit = f"the largest KV cache holds {model.pool_tokens} tokens with at least one of output"
    else:
        return
    violations.add(field, f"has {num_tokens} tokens; {limit}")


async def _read_text(text: str, field: str, model: ServedModel, violations: Violations) -> Sequence[int]:
    if not _is_readable(len(text), field, model, violations):
        return ()
    token_ids = await _off_loop(lambda: model.text.encode(text), len(text)) if text else ()
    violations.require(len(token_ids) > 0, field, "must not be empty")
    return token_ids


async def _read_chat(chat: ChatMessages, field: str, model: ServedModel, violations: Violations) -> Sequence[int]:
    if not chat.messages:
        violations.add(field, "must have at least one message")
        return ()
    if len(chat.messages) > model.max_model_len:
        violations.add(field, f"has {len(chat.messages)} messages; the model takes {model.max_model_len} tokens")
        return ()
    for index, message in enumerate(chat.messages):
        if not message.role:
            violations.add(f"{field}.messages[{index}].role", "must not be empty")
            return ()
    num_chars = sum(len(message.content) for message in chat.messages)
    if not _is_readable(num_chars, field, model, violations):
        return ()
    messages = [{"role": message.role, "content": message.content} for message in chat.messages]
    try:
        token_ids = await _off_loop(lambda: model.text.encode_chat(messages), num_chars)
    except ValueError as error:
        violations.add(field, str(error))
        return ()
    violations.require(len(token_ids) > 0, field, "the model's chat template makes an empty prompt of it")
    return token_ids


def _is_readable(num_chars: int, field: str, model: ServedModel, violations: Violations) -> bool:
    if num_chars <= _ALWAYS_READ_CHARS or num_chars <= model.max_model_len * model.text.longest_token:
        return True
    violations.add(field, f"has {num_chars} characters; the model takes {model.max_model_len} tokens")
    return False


async def _off_loop(encode: Callable[[], list[int]], num_chars: int) -> list[int]:
    if num_chars <= _LONG_TEXT_CHARS:
        return encode()
    return await asyncio.get_running_loop().run_in_executor(_TOKENISING, encode)


def _in_vocabulary(token_ids: Sequence[int], field: str, vocab_size: int, violations: Violations) -> Sequence[int]:
    """Also for text: a tokenizer can know tokens that the model does not."""
    if not token_ids or (min(token_ids) >= 0 and max(token_ids) < vocab_size):
        return token_ids
    index, token_id = next((i, t) for i, t in enumerate(token_ids) if not 0 <= t < vocab_size)
    violations.add(field, f"token ids must be from 0 to {vocab_size - 1}; got {token_id} at index {index}")
    return ()
