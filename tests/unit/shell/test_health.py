"""What health says, and how soon."""

from __future__ import annotations

import asyncio
from typing import Any

from grpc_health.v1 import health_pb2
from tokenmill_scheduler.health import LIVENESS, Health

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


async def told(health: Health, service: str) -> Any:
    answer = await health.servicer.Check(health_pb2.HealthCheckRequest(service=service), None)
    return answer.status


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def test_readiness_follows_its_reason_without_delay_once_told() -> None:
    trouble = ["no executor is connected"]
    health = Health(["a.Service"], lambda: trouble[0], lambda: "")
    watching = asyncio.create_task(health.watch())
    await settle()
    assert await told(health, "a.Service") == await told(health, "") == NOT_SERVING
    trouble[0] = ""
    health.changed()
    await settle()
    assert await told(health, "a.Service") == await told(health, "") == SERVING
    watching.cancel()


async def test_c42_liveness_hangs_on_the_loop_alone() -> None:
    dead = [""]
    health = Health([], lambda: "no executor is connected", lambda: dead[0])
    watching = asyncio.create_task(health.watch())
    await settle()
    assert await told(health, LIVENESS) == SERVING
    dead[0] = "the loop stands still"
    health.changed()
    await settle()
    assert await told(health, LIVENESS) == NOT_SERVING
    watching.cancel()


async def test_after_shut_down_nothing_is_serving_any_more() -> None:
    health = Health(["a.Service"], lambda: "", lambda: "")
    watching = asyncio.create_task(health.watch())
    await settle()
    await health.shut_down()
    health.changed()
    await settle()
    assert await told(health, "a.Service") == NOT_SERVING
    watching.cancel()
