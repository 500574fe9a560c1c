"""Who may come in? TLS and passwords, as the web configuration in force wants them.

Passwords are checked by a thread of its own, which starts with the first one.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from kvwatch.exporters.web_auth import Access, Authenticator
from kvwatch.exporters.web_config import BadCertificateError, WebConfig
from kvwatch.exporters.web_conn import Conn
from kvwatch.exporters.web_http import Request, too_many_unchecked

if TYPE_CHECKING:
    from kvwatch.exporters.web_tls import TlsContexts


class Guard:
    """Holds `config`, the configuration in force, which is asked for with every request. Thread-safe.

    `checked` gets a connection back once its password is checked; `most` may wait for that.
    """

    def __init__(
        self, web_config: Callable[[], WebConfig | None] | None, most: int, checked: Callable[[Conn], None]
    ) -> None:
        self.config = WebConfig()
        self.unchecked: queue.Queue[tuple[Conn, WebConfig] | None] = queue.Queue(most)
        self.thread: threading.Thread | None = None
        self._web_config = web_config
        self._checked = checked
        self._tls: TlsContexts | None = None
        self._auth: Authenticator | None = None
        self._starting = threading.Lock()  # guards the lazy parts
        self._stopping = False

    @property
    def absent(self) -> bool:
        """Whether nothing is protected, now or later."""
        return self._web_config is None

    def refresh(self) -> WebConfig:
        """Ask for the configuration in force."""
        if self._web_config is not None:
            self.config = self._web_config() or WebConfig()
        return self.config

    def try_certificate(self) -> None:
        """Raise BadCertificateError (an OSError) where the configured TLS cannot work."""
        tls = self.refresh().tls
        if tls is None:
            return
        try:
            self._contexts().get(tls)
        except OSError as error:
            files = ", ".join(filter(None, (tls.cert_file, tls.key_file, tls.client_ca_file)))
            raise BadCertificateError(f"{files or 'the inline PEM'} cannot be used: {error}") from error

    def handshake(self, conn: Conn, config: WebConfig) -> bool:
        """Go on with the TLS handshake; whether it is done. OSError for a client that may not come in."""
        if conn.secure_socket is None:
            if config.tls is None:
                raise OSError("TLS was switched off meanwhile")
            conn.wrap(self._contexts().get(config.tls))
        if not conn.handshake():
            return False
        secure = conn.secure_socket
        if secure is not None and config.tls is not None and config.tls.client_allowed_sans:
            from kvwatch.exporters.web_tls import client_allowed

            if not client_allowed(config.tls, secure):
                raise OSError("the client's certificate has none of the allowed names")
        return True

    def access(self, conn: Conn, request: Request, config: WebConfig) -> Access:
        """What this request may do; UNCHECKED when it went to have its password checked. HttpError 503."""
        if not config.users:
            return Access.ALLOWED
        access, conn.access = conn.access, None
        if access is None:
            access = self._authenticator().check(config.users, request.header("authorization"))
        if access is Access.UNCHECKED:
            conn.pending = request
            try:
                self.unchecked.put_nowait((conn, config))
            except queue.Full:
                conn.pending = None
                raise too_many_unchecked() from None
        return access

    def stop(self) -> None:
        """Close whoever waits, and let `thread` end."""
        self._stopping = True
        with contextlib.suppress(queue.Empty):
            while True:
                job = self.unchecked.get_nowait()
                if job is not None:
                    job[0].close()
        with contextlib.suppress(queue.Full):  # then the thread is awake and sees that we stop
            self.unchecked.put_nowait(None)

    def _check_passwords(self) -> None:
        while (job := self.unchecked.get()) is not None:
            conn, config = job
            if self._stopping:
                conn.close()
                continue
            assert conn.pending is not None  # noqa: S101 set before it was queued
            conn.access = self._authenticator().verify(config.users, conn.pending.header("authorization"))
            self._checked(conn)

    def _contexts(self) -> TlsContexts:
        with self._starting:
            if self._tls is None:
                from kvwatch.exporters.web_tls import TlsContexts

                self._tls = TlsContexts()
            return self._tls

    def _authenticator(self) -> Authenticator:
        with self._starting:
            if self._auth is None:
                self._auth = Authenticator()
                self.thread = threading.Thread(target=self._check_passwords, name="web-auth", daemon=True)
                self.thread.start()
            return self._auth
