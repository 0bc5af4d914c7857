"""A tokenmill scheduler as what a benchmark drives."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

from tokenmill_client import AsyncClient
from tokenmill_client.admin_records import Load


class GrpcTarget:
    def __init__(self, client: AsyncClient, model: str = "") -> None:
        self._client = client
        self._model = model

    async def generate(self, prompt: Sequence[int], output_tokens: int) -> AsyncIterator[int]:
        stream = self._client.generate(
            token_ids=prompt,
            model=self._model,
            output="token_ids",
            max_tokens=output_tokens,
            ignore_eos=True,
            temperature=0,
        )
        async with stream:
            async for delta in stream:
                if delta.token_count:
                    yield delta.token_count

    async def load(self) -> Load:
        return await self._client.admin.get_load()
