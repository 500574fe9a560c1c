"""The web configuration in exporter-toolkit's format."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from kvwatch.exporters.web_config import Finding, WebConfig, WebConfigFile

TLS = "cert_file: server.crt, key_file: server.key"
HASH = "$2y$10$X0h1gDsPszWURQaxFh.zoubFi6DXncSjhoQNJgRrnGs7EsimhC7zG"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with files of the usual names."""
    for name in ("server.crt", "server.key", "ca.crt"):
        (tmp_path / name).write_text("pem")
    return tmp_path


def check(text: str, folder: Path) -> tuple[WebConfig | None, list[Finding]]:
    """Parse and check one file's text."""
    return WebConfig.from_mapping(yaml.safe_load(text), str(folder))


GOOD = {
    "empty": "",
    "tls": "tls_server_config: {cert_file: server.crt, key_file: server.key}",
    "mutual": """
tls_server_config:
  cert_file: server.crt
  key_file: server.key
  client_auth_type: RequireAndVerifyClientCert
  client_ca_file: ca.crt
  client_allowed_sans: [scraper.example]
  min_version: TLS13
  prefer_server_cipher_suites: true
""",
    "if given": (
        f"tls_server_config: {{{TLS}, client_auth_type: VerifyClientCertIfGiven, client_ca_file: ca.crt}}"
    ),
    "inline": "tls_server_config: {cert: pem, key: pem}",
    "users": f"basic_auth_users: {{alice: '{HASH}', bob: '{HASH}'}}",
    "headers": "http_server_config: {http2: false, headers: {X-Frame-Options: deny, X-XSS-Protection: ''}}",
}
BAD = {
    "no table": ("[1]", ""),
    "unknown key": ("tls: {}", "tls"),
    "rate limit": ("rate_limit: {interval: 1s, burst: 2}", "rate_limit"),
    "no key": ("tls_server_config: {cert_file: server.crt}", "tls_server_config.key_file"),
    "no cert": ("tls_server_config: {key_file: server.key}", "tls_server_config.cert_file"),
    "missing file": (
        "tls_server_config: {cert_file: no.crt, key_file: server.key}",
        "tls_server_config.cert_file",
    ),
    "both": (
        "tls_server_config: {cert_file: server.crt, cert: x, key_file: server.key}",
        "tls_server_config.cert",
    ),
    "old tls": (
        f"tls_server_config: {{{TLS}, min_version: TLS10}}",
        "tls_server_config.min_version",
    ),
    "swapped versions": (
        f"tls_server_config: {{{TLS}, min_version: TLS13, max_version: TLS12}}",
        "tls_server_config.min_version",
    ),
    "any client": (
        f"tls_server_config: {{{TLS}, client_auth_type: RequireAnyClientCert}}",
        "tls_server_config.client_auth_type",
    ),
    "client type": (
        f"tls_server_config: {{{TLS}, client_auth_type: Nope}}",
        "tls_server_config.client_auth_type",
    ),
    "no ca": (
        f"tls_server_config: {{{TLS}, client_auth_type: RequireAndVerifyClientCert}}",
        "tls_server_config.client_ca_file",
    ),
    "unused ca": (
        f"tls_server_config: {{{TLS}, client_ca_file: ca.crt}}",
        "tls_server_config.client_auth_type",
    ),
    "sans without mutual": (
        f"tls_server_config: {{{TLS}, client_allowed_sans: [x]}}",
        "tls_server_config.client_allowed_sans",
    ),
    "ciphers": (
        f"tls_server_config: {{{TLS}, cipher_suites: [TLS_X]}}",
        "tls_server_config.cipher_suites",
    ),
    "number for file": (
        "tls_server_config: {cert_file: 1, key_file: server.key}",
        "tls_server_config.cert_file",
    ),
    "plain password": ("basic_auth_users: {alice: secret}", "basic_auth_users.alice"),
    "colon": (f"basic_auth_users: {{'a:b': '{HASH}'}}", "basic_auth_users.a:b"),
    "user list": ("basic_auth_users: [alice]", "basic_auth_users"),
    "strange header": (
        "http_server_config: {headers: {Set-Cookie: x}}",
        "http_server_config.headers.Set-Cookie",
    ),
    "two-line header": (
        'http_server_config: {headers: {X-Frame-Options: "a\\r\\nX: y"}}',
        "http_server_config.headers.X-Frame-Options",
    ),
}


@pytest.mark.parametrize("text", GOOD.values(), ids=GOOD)
def test_good_files_are_taken(text: str, folder: Path) -> None:
    """What exporter-toolkit documents and kvwatch honours has no findings."""
    config, findings = check(text, folder)

    assert findings == []
    assert config is not None


@pytest.mark.parametrize(("text", "path"), BAD.values(), ids=BAD)
def test_bad_files_say_where_and_what_to_do(text: str, path: str, folder: Path) -> None:
    """Each mistake is found at its place with a sentence, and no configuration is made."""
    config, findings = check(text, folder)

    assert config is None
    assert path in [f.path for f in findings]
    assert all(f.message for f in findings)


def test_relative_paths_are_the_files_neighbours(folder: Path) -> None:
    """Certificate paths are relative to the web configuration's folder."""
    config, _ = check(GOOD["tls"], folder)

    assert config is not None
    assert config.tls is not None
    assert config.tls.cert_file == str(folder / "server.crt")


def test_all_findings_come_at_once(folder: Path) -> None:
    """Two mistakes in two sections are both reported."""
    _, findings = check("tls_server_config: {cert_file: no.crt}\nbasic_auth_users: {a: b}", folder)

    assert len(findings) == 3


def test_hashes_are_not_in_the_repr(folder: Path) -> None:
    """A logged configuration shows neither hashes nor keys."""
    config, _ = check(GOOD["users"], folder)

    assert HASH not in repr(config)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(
                    [
                        "tls_server_config",
                        "basic_auth_users",
                        "http_server_config",
                        "headers",
                        "cert_file",
                        "min_version",
                    ]
                )
                | st.integers(),
                inner,
                max_size=3,
            )
        ),
        max_leaves=12,
    )
)
def test_any_shape_gives_findings_not_faults(data: object) -> None:
    """Whatever YAML yields, the answer is a configuration or findings."""
    config, findings = WebConfig.from_mapping(data, "/nowhere")

    assert (config is None) == bool(findings)


def _file(folder: Path, text: str) -> tuple[WebConfigFile, Path]:
    path = folder / "web.yml"
    path.write_text(text)

    def parse(name: str) -> tuple[WebConfig | None, list[Finding]]:
        return WebConfig.from_mapping(yaml.safe_load(Path(name).read_text()), str(folder))

    return WebConfigFile(str(path), parse), path


def test_a_changed_file_is_read_again(folder: Path) -> None:
    """New users count without a restart."""
    source, path = _file(folder, GOOD["users"])
    before = source()
    path.write_text(f"basic_auth_users: {{carol: '{HASH}'}}")

    after = source()
    assert before is not None
    assert after is not None
    assert (set(before.users), set(after.users)) == ({"alice", "bob"}, {"carol"})


@pytest.mark.parametrize("text", ["", "basic_auth_users: {alice: plain}", "basic_auth_users: {}"])
def test_a_truncated_or_bad_file_opens_no_door(text: str, folder: Path) -> None:
    """A file that lost its users, or became bad, changes nothing until the next start."""
    source, path = _file(folder, GOOD["users"])
    before = source()
    path.write_text(text)

    assert source() == before
    path.unlink()
    assert source() == before


def test_a_bad_file_at_start_is_an_error(folder: Path) -> None:
    """Without any good configuration there is an error, not an open server."""
    source, _ = _file(folder, "basic_auth_users: {alice: plain}")

    with pytest.raises(OSError, match="no good web configuration"):
        source()
