"""How is the web server protected? TLS, client certificates and passwords, in exporter-toolkit's format.

The format is described in https://github.com/prometheus/exporter-toolkit/blob/master/docs/web-configuration.md.
What kvwatch cannot honour there is a finding, never silently ignored.
"""

from __future__ import annotations

import logging
import os
import re
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

log = logging.getLogger(__name__)

CLIENT_AUTH_TYPES = (
    "NoClientCert",
    "RequestClientCert",
    "VerifyClientCertIfGiven",
    "RequireAndVerifyClientCert",
)
VERSIONS = ("TLS10", "TLS11", "TLS12", "TLS13")
# The only response headers that exporter-toolkit lets a file set.
HEADERS = (
    "Content-Security-Policy",
    "Strict-Transport-Security",
    "X-Content-Type-Options",
    "X-Frame-Options",
    "X-XSS-Protection",
)
_BCRYPT = re.compile(r"\$2[abxy]\$(?:0[4-9]|[12]\d|3[01])\$[./A-Za-z0-9]{53}\Z")
_TLS_TEXTS = (
    "cert",
    "key",
    "client_ca",
    "cert_file",
    "key_file",
    "client_ca_file",
    "client_auth_type",
    "min_version",
    "max_version",
)
_TLS_UNSUPPORTED = ("cipher_suites", "curve_preferences")


class BadCertificateError(OSError):
    """Certificate, key or authority cannot be used; the text names the files."""


class Finding(NamedTuple):
    """One thing that is wrong: where (dotted path) and what to do."""

    path: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsServerConfig:
    """`tls_server_config`: certificate and key as files or inline PEM, and who may connect."""

    cert_file: str = ""
    key_file: str = ""
    cert: str = field(default="", repr=False)
    key: str = field(default="", repr=False)
    client_auth_type: str = "NoClientCert"
    client_ca_file: str = ""
    client_ca: str = field(default="", repr=False)
    client_allowed_sans: tuple[str, ...] = ()
    min_version: str = "TLS12"
    max_version: str = "TLS13"

    @property
    def verifies_clients(self) -> bool:
        """Whether a client's certificate is checked."""
        return self.client_auth_type in ("VerifyClientCertIfGiven", "RequireAndVerifyClientCert")


@dataclass(frozen=True, slots=True, kw_only=True)
class WebConfig:
    """A checked web configuration. `users` maps names to bcrypt hashes."""

    tls: TlsServerConfig | None = None
    users: Mapping[str, str] = field(default_factory=dict, repr=False)
    headers: tuple[tuple[str, str], ...] = ()

    @classmethod
    def from_mapping(cls, data: object, base_dir: str = "") -> tuple[WebConfig | None, list[Finding]]:
        """Check a parsed file; relative paths are relative to `base_dir`. None when there are findings."""
        if data is None:
            data = {}
        if not isinstance(data, Mapping):
            return None, [Finding("", "must be a table")]
        findings = list(
            _unknown_keys(data, ("tls_server_config", "http_server_config", "basic_auth_users"), "")
        )
        tls = _tls(data.get("tls_server_config"), base_dir, findings)
        headers = _headers(data.get("http_server_config"), findings)
        users = _users(data.get("basic_auth_users"), findings)
        if findings:
            return None, findings
        return cls(tls=tls, users=users, headers=headers), []


def _unknown_keys(data: Mapping[object, object], known: tuple[str, ...], prefix: str) -> Iterator[Finding]:
    for key in data:
        if key == "rate_limit" and not prefix:
            yield Finding("rate_limit", "kvwatch does not limit rates; remove it, or put a proxy in front")
        elif key in _TLS_UNSUPPORTED and prefix:
            yield Finding(f"{prefix}{key}", "kvwatch does not set this; remove it and use min_version")
        elif key not in known:
            yield Finding(f"{prefix}{key}", f"unknown key; known are {', '.join(known)}")


def _tls(data: object, base_dir: str, findings: list[Finding]) -> TlsServerConfig | None:
    if data is None:
        return None
    if not isinstance(data, Mapping):
        findings.append(Finding("tls_server_config", "must be a table"))
        return None
    prefix = "tls_server_config."
    known = (*_TLS_TEXTS, "client_allowed_sans", "prefer_server_cipher_suites")
    found = list(_unknown_keys(data, known, prefix))
    texts: dict[str, str] = {}
    for name in _TLS_TEXTS:
        value = data.get(name)
        if value is not None and not isinstance(value, str):
            found.append(Finding(prefix + name, "must be a text"))
        elif value:
            texts[name] = os.path.join(base_dir, value) if name.endswith("_file") else value  # noqa: PTH118
    sans = data.get("client_allowed_sans") or []
    if not isinstance(sans, list) or not all(isinstance(san, str) for san in sans):
        found.append(Finding(prefix + "client_allowed_sans", "must be a list of texts"))
        sans = []
    config = TlsServerConfig(**texts, client_allowed_sans=tuple(sans))
    findings += found or [Finding(prefix + path, message) for path, message in _tls_rules(config)]
    return config


def _tls_rules(config: TlsServerConfig) -> Iterator[Finding]:
    for name in ("cert", "key", "client_ca"):
        inline, path = getattr(config, name), getattr(config, f"{name}_file")
        if inline and path:
            yield Finding(name, f"give either {name} or {name}_file")
        if not inline and not path and name != "client_ca":
            yield Finding(f"{name}_file", "is missing: TLS needs a certificate and its key")
        if path and not os.access(path, os.R_OK):
            yield Finding(f"{name}_file", f"{path} is not there or not readable")
    yield from _client_rules(config)
    for name, version in (("min_version", config.min_version), ("max_version", config.max_version)):
        if version not in VERSIONS:
            yield Finding(name, f"{version!r} is none of {', '.join(VERSIONS)}")
        elif version in VERSIONS[:2]:
            yield Finding(name, f"{version} is broken and not offered; use TLS12 or TLS13")
    if config.min_version > config.max_version:
        yield Finding("min_version", "is above max_version")


def _client_rules(config: TlsServerConfig) -> Iterator[Finding]:
    kind, has_ca = config.client_auth_type, bool(config.client_ca or config.client_ca_file)
    if kind == "RequireAnyClientCert":
        yield Finding(
            "client_auth_type", "RequireAnyClientCert checks nothing; use RequireAndVerifyClientCert"
        )
    elif kind not in CLIENT_AUTH_TYPES:
        yield Finding("client_auth_type", f"{kind!r} is none of {', '.join(CLIENT_AUTH_TYPES)}")
    elif config.verifies_clients and not has_ca:
        yield Finding("client_ca_file", f"is missing: {kind} needs the CA that signs the clients")
    elif has_ca and not config.verifies_clients:
        yield Finding("client_auth_type", "a client CA is set but not used; set RequireAndVerifyClientCert")
    if config.client_allowed_sans and kind != "RequireAndVerifyClientCert":
        yield Finding("client_allowed_sans", "needs client_auth_type RequireAndVerifyClientCert")


def _headers(data: object, findings: list[Finding]) -> tuple[tuple[str, str], ...]:
    if data is None:
        return ()
    if not isinstance(data, Mapping):
        findings.append(Finding("http_server_config", "must be a table"))
        return ()
    # http2 is allowed and without effect: HTTP/1.1 is what this server speaks
    findings += _unknown_keys(data, ("http2", "headers"), "http_server_config.")
    headers = data.get("headers") or {}
    where = "http_server_config.headers"
    if not isinstance(headers, Mapping):
        findings.append(Finding(where, "must be a table"))
        return ()
    findings += _unknown_keys(headers, HEADERS, where + ".")
    for name, value in headers.items():
        if not isinstance(value, str) or not value.isprintable() or not value.isascii():
            findings.append(Finding(f"{where}.{name}", "must be one line of plain text"))
    return tuple((str(name), str(value)) for name, value in headers.items() if value)


def _users(data: object, findings: list[Finding]) -> dict[str, str]:
    if data is None:
        return {}
    if not isinstance(data, Mapping):
        findings.append(Finding("basic_auth_users", "must be a table of names and bcrypt hashes"))
        return {}
    for name, hashed in data.items():
        where = f"basic_auth_users.{name}"
        if not isinstance(name, str) or not name or ":" in name:
            findings.append(Finding(where, "a user's name must be a text without a colon"))
        if not isinstance(hashed, str) or not _BCRYPT.match(hashed):
            findings.append(Finding(where, "is no bcrypt hash; make one with: htpasswd -nBC 10 USER"))
    if data and not bcrypt_installed():
        findings.append(Finding("basic_auth_users", f"needs bcrypt: {sys.executable} -m pip install bcrypt"))
    return {str(name): str(hashed) for name, hashed in data.items()}


def bcrypt_installed() -> bool:
    """Whether passwords can be checked here (bcrypt is an optional extra)."""
    try:
        import bcrypt  # noqa: F401 only whether it is there
    except ImportError:
        return False
    return True


class WebConfigFile:
    """A web configuration that is read again when its file changes; calling it gives the present one.

    A file that has become bad, or has lost the protection that it had, changes nothing until
    kvwatch is restarted: an editor that truncates before it writes must not open the door.
    """

    def __init__(self, path: str, parse: Callable[[str], tuple[WebConfig | None, list[Finding]]]) -> None:
        self._path = path
        self._parse = parse
        self._stamp: tuple[int, int, int] | None = None
        self._config: WebConfig | None = None
        self._lock = threading.Lock()  # workers ask at the same time; one of them reads

    def load(self) -> list[Finding]:
        """Read the file now; its findings, [] when it is in use."""
        self._stamp = self._stat()
        try:
            config, findings = self._parse(self._path)
        except OSError as error:
            return [Finding("", f"cannot be read: {error.strerror or error}")]
        if config is not None and not findings:
            findings = list(self._lost_protection(config))
            if not findings:
                self._config = config
        return findings

    def __call__(self) -> WebConfig | None:
        """The configuration in use, read again if the file has changed; OSError when there never was one."""
        with self._lock:
            if self._stat() != self._stamp:
                for path, message in self.load():
                    log.warning("web configuration not used: %s: %s: %s", self._path, path, message)
            if self._config is None:
                raise OSError(f"{self._path}: no good web configuration")
            return self._config

    def _stat(self) -> tuple[int, int, int] | None:
        try:
            found = os.stat(self._path)  # noqa: PTH116
        except OSError:
            return None
        return found.st_mtime_ns, found.st_size, found.st_ino

    def _lost_protection(self, new: WebConfig) -> Iterator[Finding]:
        if self._config is not None and self._config.tls is not None and new.tls is None:
            yield Finding("tls_server_config", "is gone; restart kvwatch to serve without TLS")
        if self._config is not None and self._config.users and not new.users:
            yield Finding("basic_auth_users", "are gone; restart kvwatch to serve without passwords")
