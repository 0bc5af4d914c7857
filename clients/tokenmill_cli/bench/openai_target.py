"""Any server with OpenAI's completions API as what a benchmark drives: vLLM, llama.cpp, SGLang, tokenmill's own gateway.

Prompts are token ids and outputs have an exact length, which is what those servers add to the API (`ignore_eos`).
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from types import TracebackType
from typing import Any, Self

import httpx2

from tokenmill_cli.bench.runner import TargetError

# A request may wait for all others; one that gets nothing for so long is lost.
_SILENCE_LIMIT_S = 300.0
_DATA = "data:"


class OpenAiTarget:
    """At `base_url`, which ends in `/v1`. Use it as a context; `model` is what the server offers first, unless given."""

    def __init__(self, base_url: str, model: str = "", api_key: str = "") -> None:
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=None)
        timeout = httpx2.Timeout(_SILENCE_LIMIT_S, pool=None)
        # A benchmark's server is named on the command line: no proxy from the environment stands before it.
        self._http = httpx2.AsyncClient(base_url=base_url, headers=headers, limits=limits, timeout=timeout, trust_env=False)
        self.model = model

    async def __aenter__(self) -> Self:
        try:
            self.model = self.model or (await self._first_model())
        except BaseException:
            await self._http.aclose()
            raise
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self._http.aclose()

    async def _first_model(self) -> str:
        try:
            response = await self._http.get("models")
            response.raise_for_status()
            return str(response.json()["data"][0]["id"])
        except (httpx2.HTTPError, ValueError, LookupError, TypeError) as error:
            raise TargetError(f"{self._http.base_url}models does not name a model: {_reason(error)}") from error

    async def generate(self, prompt: Sequence[int], output_tokens: int) -> AsyncIterator[int]:
        """Servers tell the exact count at the end only: each event counts as a token, the last makes up the difference."""
        body = {
            "model": self.model,
            "prompt": list(prompt),
            "max_tokens": output_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        made, total = 0, 0
        try:
            async with self._http.stream("POST", "completions", json=body) as response:
                if response.is_error:
                    raise TargetError(f"HTTP {response.status_code}: {(await response.aread()).decode(errors='replace')[:200]}")
                async for event in _events(response):
                    if (usage := event.get("usage")) is not None:
                        total = usage["completion_tokens"]
                    if event.get("choices") and made < output_tokens:
                        made += 1
                        total = max(total, made)
                        yield 1
        except (httpx2.HTTPError, ValueError, LookupError, TypeError) as error:
            raise TargetError(f"{self._http.base_url} does not stream completions: {_reason(error)}") from error
        if made < total:
            yield total - made

    async def load(self) -> None:
        return None


def _reason(error: Exception) -> str:
    """Not all errors of a connection have words."""
    return str(error) or type(error).__name__


async def _events(response: httpx2.Response) -> AsyncIterator[dict[str, Any]]:
    """Of a stream of server-sent events, one JSON object in each."""
    async for line in response.aiter_lines():
        data = line.removeprefix(_DATA).strip()
        if line.startswith(_DATA) and data != "[DONE]":
            event = json.loads(data)
            if "error" in event:
                raise TargetError(str(event["error"]))
            yield event
