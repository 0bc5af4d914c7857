"""What operators did and hold back, for the ledger in memory."""

from __future__ import annotations

from dataclasses import dataclass, field

from tokenmill_scheduler.ledger.records import Action, ActionPage, ActionQuery, ActionVerb, Hold


@dataclass
class MemoryActions:
    _numbered: dict[int, Action] = field(default_factory=dict)
    _holds: dict[str, Hold] = field(default_factory=dict)
    _last_number: int = 0

    def record(self, action: Action) -> None:
        self._last_number += 1
        self._numbered[self._last_number] = action
        match action.verb:
            case ActionVerb.PAUSE_QUEUE | ActionVerb.DRAIN_EXECUTOR | ActionVerb.SET_POLICY:
                self._holds[action.target] = Hold(action.target, action.actor, action.reason, action.at_s, action.detail)
            case ActionVerb.RESUME_QUEUE | ActionVerb.UNDRAIN_EXECUTOR | ActionVerb.RESET_POLICY:
                self._holds.pop(action.target, None)

    def query(self, query: ActionQuery) -> ActionPage:
        before = int(query.page_token) if query.page_token else self._last_number + 1
        if before < 0:
            raise ValueError("no page token of this ledger")
        found = [
            (number, action)
            for number, action in reversed(self._numbered.items())
            if number < before and query.target in ("", action.target)
        ]
        shown = found[: query.limit]
        return ActionPage(tuple(action for _, action in shown), str(shown[-1][0]) if len(found) > query.limit else "")

    def holds(self) -> tuple[Hold, ...]:
        return tuple(hold for _, hold in sorted(self._holds.items()))

    def prune(self, before_s: float, limit: int) -> None:
        old = sorted((action.at_s, number) for number, action in self._numbered.items() if action.at_s < before_s)
        for _, number in old[:limit]:
            del self._numbered[number]
