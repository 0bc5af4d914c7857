"""Which models can be asked for: the text side of each, and the limits of the executors that serve it.

A model once served stays known while its executors are away, so that requests queue instead of failing. Must not know: the core.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from tokenmill_scheduler.desk.errors import Unavailable, UnknownModel
from tokenmill_scheduler.desk.records import ServedModel
from tokenmill_scheduler.text.model import TextModel
from tokenmill_scheduler.wire import ExecutorFacts

# Executors connect within moments of a start.
RETRY_DELAY_S = 0.1


class Models:
    def __init__(self) -> None:
        self._texts: dict[str, TextModel] = {}
        # By executor name: what it last said of itself, and whether it is connected.
        self._executors: dict[str, tuple[ExecutorFacts, bool]] = {}

    def knows_tokenizer(self, digest: str) -> bool:
        return digest in self._texts

    async def learn_tokenizer(self, digest: str, files: Mapping[str, bytes]) -> None:
        """Raises ValueError when the files are no tokenizer."""
        self._texts[digest] = await asyncio.to_thread(TextModel, files)

    def conflict(self, facts: ExecutorFacts) -> str:
        """Why this executor cannot serve beside those connected; empty if it can."""
        name, model = facts.description.name, facts.description.model
        for other, (known, connected) in self._executors.items():
            same_model = known.description.model == model
            if other != name and connected and same_model and known.tokenizer_digest != facts.tokenizer_digest:
                return f"executor {name} serves model {model} with another tokenizer than executor {other}"
        return ""

    def joined(self, facts: ExecutorFacts) -> None:
        self._executors[facts.description.name] = (facts, True)

    def lost(self, name: str) -> None:
        self._executors[name] = (self._executors[name][0], False)

    def forget(self, name: str) -> None:
        """This executor is another scheduler's: a model that it alone served is not to be had here any more."""
        self._executors.pop(name, None)

    def find(self, name: str) -> ServedModel:
        """The model of this name, or the only one when it is empty. Raises UnknownModel, or Unavailable before any is known."""
        served = {model.name: model for model in self.all()}
        if not served:
            raise Unavailable("no executor has connected yet", RETRY_DELAY_S)
        if not name and len(served) == 1:
            return next(iter(served.values()))
        if name in served:
            return served[name]
        names = ", ".join(served)
        raise UnknownModel(f"model {name!r} is not served; there is: {names}" if name else f"name one of the models: {names}")

    def all(self) -> tuple[ServedModel, ...]:
        by_model: dict[str, list[tuple[ExecutorFacts, bool]]] = {}
        for facts, connected in self._executors.values():
            by_model.setdefault(facts.description.model, []).append((facts, connected))
        return tuple(self._served(name, executors) for name, executors in by_model.items())

    def _served(self, name: str, executors: list[tuple[ExecutorFacts, bool]]) -> ServedModel:
        current = [facts for facts, connected in executors if connected] or [executors[-1][0]]
        return ServedModel(
            name=name,
            text=self._texts[current[0].tokenizer_digest],
            max_model_len=min(facts.description.max_model_len for facts in current),
            vocab_size=min(facts.vocab_size for facts in current),
            pool_tokens=max(facts.description.num_blocks * facts.description.block_size for facts in current),
            tokenizer_digest=current[0].tokenizer_digest,
            executors=sum(connected for _, connected in executors),
        )
