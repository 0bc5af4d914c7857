"""Fair shares between tenants: whoever has had the fewest tokens for its weight goes first.

This is deficit round robin (Shreedhar and Varghese, SIGCOMM 1995) with a quantum of one token, kept as in start-time fair queueing
(Goyal, Vin and Cheng, SIGCOMM 1996), and for tokens by Sheng et al. ("Fairness in Serving Large Language Models", OSDI 2024): a
tenant's account is the tokens it was charged over its weight. One that comes back is raised to the account at which one was served
last, so nobody saves up while it asks for nothing. Must not know: requests, what is charged for.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable

_SLACK = 64


class FairShare:
    """A change takes O(log n) comparisons for n tenants that wait. `weight` is above 0."""

    def __init__(self, weight: Callable[[str], float]) -> None:
        self._weight = weight
        self._accounts: dict[str, float] = {}
        # Those that wait, soonest first; ties by name.
        self._waiting: list[tuple[float, str]] = []
        self._floor = 0.0

    def __len__(self) -> int:
        """Accounts kept."""
        return len(self._accounts)

    def account(self, tenant: str) -> float:
        return self._accounts.get(tenant, self._floor)

    def after(self, account: float, tenant: str, tokens: int) -> float:
        """The account once so many tokens more are charged."""
        return account + tokens / self._weight(tenant)

    def order(self) -> list[tuple[float, str]]:
        """Account and name of those that wait, soonest first: a copy."""
        return self._waiting.copy()

    def came(self, tenant: str) -> None:
        """It waits, and has not before."""
        self._accounts[tenant] = max(self.account(tenant), self._floor)
        insort(self._waiting, (self._accounts[tenant], tenant))

    def left(self, tenant: str) -> None:
        """It waits no more; its account is kept."""
        del self._waiting[self._place(tenant)]
        if len(self._accounts) > 2 * len(self._waiting) + _SLACK:
            self._forget()

    def charge(self, tenant: str, tokens: int) -> None:
        """As it is served; fewer than 0 are given back later."""
        before = self.account(tenant)
        if tokens > 0:
            self._floor = max(self._floor, before)
        place = bisect_left(self._waiting, (before, tenant))
        waits = place < len(self._waiting) and self._waiting[place] == (before, tenant)
        self._accounts[tenant] = after = self.after(before, tenant, tokens)
        if waits:
            del self._waiting[place]
            insort(self._waiting, (after, tenant))

    def renewed(self, weight: Callable[[str], float]) -> FairShare:
        """The same accounts, with nobody waiting."""
        after = FairShare(weight)
        after._accounts, after._floor = dict(self._accounts), self._floor
        return after

    def _place(self, tenant: str) -> int:
        place = bisect_left(self._waiting, (self._accounts[tenant], tenant))
        assert self._waiting[place][1] == tenant, "a tenant's account changed while it waited"
        return place

    def _forget(self) -> None:
        """Drops the lower half of the accounts of those that do not wait: what they would be raised to is hardly more."""
        waiting = {tenant for _, tenant in self._waiting}
        idle = sorted((account, tenant) for tenant, account in self._accounts.items() if tenant not in waiting)
        self._floor = max(self._floor, idle[len(idle) // 2][0])
        for account, tenant in idle:
            if account <= self._floor:
                del self._accounts[tenant]
