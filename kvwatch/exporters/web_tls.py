"""With which certificate does the server speak, and which clients does it let in?"""

from __future__ import annotations

import contextlib
import logging
import os
import ssl
from collections.abc import Iterator
from typing import cast

from kvwatch.exporters.web_config import TlsServerConfig

log = logging.getLogger(__name__)

_VERSIONS = {"TLS12": ssl.TLSVersion.TLSv1_2, "TLS13": ssl.TLSVersion.TLSv1_3}


class TlsContexts:
    """Keeps the context in use, and makes a new one when the configuration or a file of it changes."""

    def __init__(self) -> None:
        self._made_of: object = None
        self._context: ssl.SSLContext | None = None

    def get(self, config: TlsServerConfig) -> ssl.SSLContext:
        """The context for this configuration.

        Raises OSError (ssl.SSLError is one) when there never was a good one; later a bad
        certificate is logged once and the last good one stays.
        """
        made_of = (
            config,
            *(_stamp(path) for path in (config.cert_file, config.key_file, config.client_ca_file)),
        )
        if made_of == self._made_of and self._context is not None:
            return self._context
        try:
            self._context = make_context(config)
        except OSError as error:
            if self._context is None:
                raise
            log.warning("TLS certificate not used, the last good one stays: %s: %s", config.cert_file, error)
        self._made_of = made_of
        return self._context


def _stamp(path: str) -> tuple[int, int, int] | None:
    try:
        found = os.stat(path)  # noqa: PTH116
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def make_context(config: TlsServerConfig) -> ssl.SSLContext:
    """A server context; OSError or ssl.SSLError when certificate, key or CA are bad."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = _VERSIONS[config.min_version]
    context.maximum_version = _VERSIONS[config.max_version]
    context.options |= ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_COMPRESSION
    with _as_file(config.cert, config.cert_file) as cert, _as_file(config.key, config.key_file) as key:
        context.load_cert_chain(cert, key, password=_no_password)
    if config.verifies_clients:
        required = config.client_auth_type == "RequireAndVerifyClientCert"
        context.verify_mode = ssl.CERT_REQUIRED if required else ssl.CERT_OPTIONAL
        if config.client_ca:
            context.load_verify_locations(cadata=config.client_ca)
        else:
            context.load_verify_locations(cafile=config.client_ca_file)
    return context


def _no_password() -> str:
    """An encrypted key must fail, not ask on the terminal."""
    raise ssl.SSLError("the key is encrypted; give one without a passphrase")


@contextlib.contextmanager
def _as_file(inline: str, path: str) -> Iterator[str]:
    """A path to the PEM text: the file itself, or memory that goes away afterwards."""
    if not inline:
        yield path
        return
    fd = os.memfd_create("pem")
    try:
        os.write(fd, inline.encode())
        yield f"/proc/self/fd/{fd}"
    finally:
        os.close(fd)


def client_allowed(config: TlsServerConfig, connection: ssl.SSLSocket) -> bool:
    """Whether the client's certificate carries one of the allowed names (all, when none is listed)."""
    if not config.client_allowed_sans:
        return True
    peer = connection.getpeercert() or {}
    names = cast("tuple[tuple[str, str], ...]", peer.get("subjectAltName", ()))
    return any(value in config.client_allowed_sans for _, value in names)
