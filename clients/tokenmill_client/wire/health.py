"""`grpc.health.v1.Health/Check` by hand: its messages have one field each; grpcio-health-checking would be one more dependency."""

from __future__ import annotations

CHECK = "/grpc.health.v1.Health/Check"
_SERVING = b"\x08\x01"


def check_request(service: str) -> bytes:
    """HealthCheckRequest{service}; the name is shorter than 128 bytes."""
    name = service.encode()
    return bytes([0x0A, len(name)]) + name


def is_serving(check_response: bytes) -> bool:
    return check_response == _SERVING
