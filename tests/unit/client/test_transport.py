"""For how long a call is tried again, on a clock of its own."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from tokenmill_client import Unavailable, transport
from tokenmill_client.call import rpc_error
from tokenmill_client.retry import RetryPolicy
from tokenmill_client.transport import Transport


@pytest.mark.parametrize(("timeout_s", "call_limit_s"), [(4.0, 100.0), (100.0, 4.0)])
async def test_a_call_is_tried_until_its_deadline_or_the_policys_limit(
    monkeypatch: pytest.MonkeyPatch, timeout_s: float, call_limit_s: float
) -> None:
    now_s = 0.0
    tries_s: list[float] = []

    async def sleep(seconds: float) -> None:
        nonlocal now_s
        now_s += seconds

    async def method(request: Any, timeout: float, metadata: Any) -> None:
        tries_s.append(now_s)
        raise rpc_error(grpc.StatusCode.UNAVAILABLE, "nobody")

    monkeypatch.setattr(transport, "time", SimpleNamespace(monotonic=lambda: now_s))
    monkeypatch.setattr(transport, "asyncio", SimpleNamespace(sleep=sleep, CancelledError=asyncio.CancelledError))
    caller = Transport("127.0.0.1:1", 30.0, RetryPolicy(call_limit_s=call_limit_s), None, None)
    with pytest.raises(Unavailable):
        await caller.call(method, None, timeout_s)  # type: ignore[arg-type]
    assert tries_s[-1] == pytest.approx(4.0)
