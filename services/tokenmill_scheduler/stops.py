"""Stop strings: judged on the text of a result before the core sees it, so that no token after one is ever kept.

Must not know: plans, the ledger, streams' readers.
"""

from __future__ import annotations

from collections.abc import Callable

from tokenmill_scheduler.core.events import TextStop
from tokenmill_scheduler.core.plans import Result
from tokenmill_scheduler.live import LiveRequests, RequestView
from tokenmill_scheduler.text.model import TextModel, TextStream


class StopStrings:
    """`owner(executor, sequence_id)` names the request whose tokens would be kept; `text_model(name)` is a model's text side."""

    def __init__(self, live: LiveRequests, owner: Callable[[str, int], str | None], text_model: Callable[[str], TextModel]) -> None:
        self._live = live
        self._owner = owner
        self._text_model = text_model

    def judge(self, executor: str, result: Result) -> dict[int, TextStop]:
        """By sequence id: where the text of a sequence's new tokens completes a stop string of its request."""
        stops: dict[int, TextStop] = {}
        if not self._live.with_stop_strings:
            return stops
        at = 0
        for sequence_id, count in zip(result.sequence_ids, result.num_sampled, strict=True):
            tokens, at = result.token_ids[at : at + count], at + count
            live = self._stoppable(executor, sequence_id) if count else None
            if live is not None and (stopped_after := self._feed(live, tokens)) is not None:
                stops[sequence_id] = TextStop(stopped_after)
        return stops

    def _stoppable(self, executor: str, sequence_id: int) -> RequestView | None:
        request_id = self._owner(executor, sequence_id)
        live = None if request_id is None else self._live.get(request_id)
        return live if live is not None and live.request.stop else None

    def _feed(self, live: RequestView, tokens: tuple[int, ...]) -> int | None:
        stopped_after = self._text(live).feed(tokens).stopped_after
        live.text_fed += len(tokens)
        return stopped_after

    def _text(self, live: RequestView) -> TextStream:
        """The request's text so far; made again from its tokens after a restart, or when the core kept fewer than it was fed."""
        if live.text is None or live.text_fed != len(live.feed.tokens):
            live.text = self._text_model(live.request.model).stream_of(live.request)
            live.text.feed(live.feed.tokens)
            live.text_fed = len(live.feed.tokens)
        return live.text
