"""TLS from PEM files: checked with a sentence for the operator, read again when they have been renewed.

Must not know: what is served or called over it.
"""

from __future__ import annotations

import contextlib
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import grpc

from tokenmill_service.flags import SettingsError


@dataclass(frozen=True, slots=True)
class ServerTls:
    """Paths of PEM files. With `client_ca`, clients must show a certificate that it has signed (mutual TLS)."""

    cert: Path
    key: Path
    client_ca: Path | None


@dataclass(frozen=True, slots=True)
class ClientTls:
    """Paths of PEM files: the authority that signed the servers' certificates, and a certificate to show."""

    ca: Path
    cert: Path | None
    key: Path | None


def server_tls(values: Mapping[str, Any]) -> ServerTls | None:
    """Of the parsed flags --tls-cert, --tls-key, --tls-client-ca and --listen. None: plaintext. Raises SettingsError."""
    cert, key, client_ca = values["tls_cert"], values["tls_key"], values["tls_client_ca"]
    if cert is None and key is None and client_ca is None:
        return None
    if cert is None or key is None:
        raise SettingsError("--tls-cert and --tls-key are needed for TLS, one is missing: give a certificate and its private key")
    if values["listen"].startswith("unix:"):
        raise SettingsError("--tls-cert is of no use on a unix socket, which its file's permissions guard: leave it out")
    return ServerTls(cert, key, client_ca)


def server_credentials(tls: ServerTls) -> grpc.ServerCredentials:
    """Every handshake is made with the files as they stand then, so renewed ones need no restart. Raises SettingsError."""

    last = _configuration(tls)

    def renewed() -> grpc.ServerCertificateConfiguration:
        nonlocal last
        # In the middle of being replaced they do not fit: the last whole ones serve on.
        with contextlib.suppress(SettingsError):
            last = _configuration(tls)
        return last

    return grpc.dynamic_ssl_server_credentials(last, renewed, require_client_authentication=tls.client_ca is not None)


def channel_credentials(tls: ClientTls) -> grpc.ChannelCredentials:
    """From the files as they stand now. Raises SettingsError."""
    key, cert = None, None
    if tls.cert is not None and tls.key is not None:
        key, cert = _read_pair(tls.cert, tls.key, "--executor-tls-cert", "--executor-tls-key")
    return grpc.ssl_channel_credentials(_read_ca(tls.ca, "--executor-tls-ca"), key, cert)


def _configuration(tls: ServerTls) -> grpc.ServerCertificateConfiguration:
    pair = _read_pair(tls.cert, tls.key, "--tls-cert", "--tls-key")
    client_ca = None if tls.client_ca is None else _read_ca(tls.client_ca, "--tls-client-ca")
    return grpc.ssl_server_certificate_configuration([pair], client_ca)


def _read_pair(cert: Path, key: Path, cert_flag: str, key_flag: str) -> tuple[bytes, bytes]:
    """Private key and certificate chain. gRPC itself would find fault with them at the first connection, and say little."""
    chain, private_key = _read(cert, cert_flag), _read(key, key_flag)
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert, key, _no_password)
    except ssl.SSLError as error:
        reason = "do not belong together" if error.reason == "KEY_VALUES_MISMATCH" else "are not a certificate and its key in PEM"
        raise SettingsError(f"{cert_flag} {cert} and {key_flag} {key} {reason}: give a matching pair") from error
    except ValueError as error:
        raise SettingsError(f"{key_flag} {key} needs a password, which nobody can give here: store it without one") from error
    return private_key, chain


def _read_ca(ca: Path, flag: str) -> bytes:
    pem = _read(ca, flag)
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(ca)
    except ssl.SSLError as error:
        raise SettingsError(f"{flag} {ca} holds no certificate in PEM: give the authority's own") from error
    return pem


def _read(path: Path, flag: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise SettingsError(f"{flag} {path} cannot be read: {error.strerror}") from error


def _no_password() -> NoReturn:
    raise ValueError
