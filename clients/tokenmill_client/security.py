"""What a client proves itself with and what it asks of servers: TLS and a bearer token. Must not know: what is called."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path

import grpc


@dataclass(frozen=True, slots=True)
class Tls:
    """TLS to the server; paths of PEM files.

    `ca` is the authority that signed the server's certificate; without it, the well-known ones are trusted. `cert` and `key` are
    shown to a server that asks for a client's (mutual TLS).
    """

    ca: str | Path | None = None
    cert: str | Path | None = None
    key: str | Path | None = None


def channel_credentials(tls: Tls) -> grpc.ChannelCredentials:
    """From the files as they stand now. Raises OSError for one that cannot be read, ValueError for one that is of no use."""
    if (tls.cert is None) != (tls.key is None):
        raise ValueError("A client's certificate and its private key go together: give both, or neither.")
    ca, cert, key = (None if path is None else Path(path).read_bytes() for path in (tls.ca, tls.cert, tls.key))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        if tls.ca is not None:
            context.load_verify_locations(tls.ca)
        if tls.cert is not None:
            # The empty password keeps an encrypted key from asking for one.
            context.load_cert_chain(tls.cert, tls.key, "")
    except ssl.SSLError as error:
        raise ValueError(f"The files for TLS are not PEM, or the certificate and its key do not fit: {error.reason}.") from error
    return grpc.ssl_channel_credentials(ca, key, cert)


def call_metadata(token: str | None) -> tuple[tuple[str, str], ...]:
    """Raises ValueError, without the token in its words, for one that no metadata can carry."""
    if token is None:
        return ()
    if not token or not token.isascii() or not token.isprintable() or " " in token:
        raise ValueError("The token must be printable ASCII characters without spaces.")
    return (("authorization", f"Bearer {token}"),)
