"""The gRPC server that clients and operators call: its options, interceptors and services. Must not know: what is behind these."""

from __future__ import annotations

from collections.abc import Callable

import grpc
from grpc_health.v1 import health, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from tokenmill.admin.v1 import admin_pb2, admin_pb2_grpc
from tokenmill.inference.v1 import inference_pb2, inference_pb2_grpc

from tokenmill_scheduler.access import Access
from tokenmill_scheduler.servicers.admin import AdminServicer
from tokenmill_scheduler.servicers.auth import AuthInterceptor
from tokenmill_scheduler.servicers.errors import ErrorInterceptor
from tokenmill_scheduler.servicers.inference import InferenceServicer
from tokenmill_scheduler.servicers.sizes import received_bytes

SERVICES = (
    inference_pb2.DESCRIPTOR.services_by_name["InferenceService"].full_name,
    admin_pb2.DESCRIPTOR.services_by_name["AdminService"].full_name,
)
MAX_PENDING_CALLS = 10_000


def new_server(access: Access, refused: Callable[[str], None], max_message_bytes: int) -> grpc.aio.Server:
    """Without services yet; `refused` is told the reason of each submit that fails before it is accepted."""
    return grpc.aio.server(
        interceptors=[ErrorInterceptor(refused, max_message_bytes), AuthInterceptor(access)],
        options=[
            # What is sent has none: the limit is of what is taken, and clients have theirs.
            ("grpc.max_receive_message_length", received_bytes(max_message_bytes)),
            # Of a burst of more calls than this that wait to be taken, gRPC cancels some at random; its default is 1,000.
            ("grpc.server.max_pending_requests", MAX_PENDING_CALLS),
            ("grpc.server.max_pending_requests_hard_limit", 2 * MAX_PENDING_CALLS),
            # Without this a second server would silently share the port.
            ("grpc.so_reuseport", 0),
            # No pings that measure the bandwidth: they wake threads on both sides, and a message opens the window it needs.
            ("grpc.http2.bdp_probe", 0),
            # A client whose host is gone is noticed; one may itself ping an idle stream once a second.
            ("grpc.keepalive_time_ms", 30_000),
            ("grpc.keepalive_timeout_ms", 10_000),
            ("grpc.http2.max_pings_without_data", 0),
            ("grpc.http2.min_recv_ping_interval_without_data_ms", 500),
        ],
    )


def add_services(
    server: grpc.aio.Server,
    inference: InferenceServicer,
    admin: AdminServicer,
    health_servicer: health_pb2_grpc.HealthServicer,
) -> None:
    """With reflection, which tells of all of them."""
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(inference, server)
    admin_pb2_grpc.add_AdminServiceServicer_to_server(admin, server)
    health_pb2_grpc.add_HealthServicer_to_server(health_servicer, server)
    reflection.enable_server_reflection([*SERVICES, health.SERVICE_NAME, reflection.SERVICE_NAME], server)
