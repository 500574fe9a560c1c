"""The web configuration: read, checked, and its findings placed."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvwatch import config

HASH = "$2y$10$" + "a" * 53


def written(tmp_path: Path, text: str) -> str:
    """A web configuration with this text."""
    path = tmp_path / "web.yml"
    path.write_text(text)
    return str(path)


def test_without_a_file_there_is_no_protection() -> None:
    """No path gives no reader."""
    assert config.web_config_reader(None) is None


def test_users_arrive_and_changes_are_read(tmp_path: Path) -> None:
    """The reader gives the users of the file, and those of the file as it is later."""
    path = written(tmp_path, f"basic_auth_users:\n  ann: {HASH}\n")
    reader = config.web_config_reader(path)
    assert reader is not None
    before = reader()
    written(tmp_path, f"basic_auth_users:\n  ann: {HASH}\n  bob_the_second: {HASH}\n")
    after = reader()

    assert before is not None
    assert after is not None
    assert (list(before.users), list(after.users)) == (["ann"], ["ann", "bob_the_second"])


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("basic_auth_users:\n  ann: hunter2\n", (2, 3, "basic_auth_users.ann")),
        ("tls_server_config:\n  cert_file: 5\n", (2, 3, "tls_server_config.cert_file")),
        ("users: {}\n", (1, 1, "users")),
        (f"basic_auth_users:\n  ann: {HASH}\n  ann: {HASH}\n", (3, 3, "basic_auth_users.ann")),
        ("a: [\n", (2, 1, "(yaml)")),
        ("- a\n", (1, 1, "(yaml)")),
    ],
)
def test_findings_have_their_place(tmp_path: Path, text: str, place: tuple[int, int, str]) -> None:
    """Each finding names file, line and column, and no hash or password."""
    path = written(tmp_path, text)

    with pytest.raises(config.ConfigError) as caught:
        config.web_config_reader(path)

    first = caught.value.findings[0]
    assert (first.line, first.col, first.path) == place
    assert first.file == path
    assert "hunter2" not in str(caught.value)


def test_a_file_that_becomes_bad_changes_nothing(tmp_path: Path) -> None:
    """While an editor writes, the last good configuration stays in use."""
    reader = config.web_config_reader(written(tmp_path, f"basic_auth_users: {{ann: {HASH}}}\n"))
    assert reader is not None
    written(tmp_path, "basic_auth_users: {ann: [\n")

    kept = reader()

    assert kept is not None
    assert list(kept.users) == ["ann"]


def test_a_missing_file_is_unreadable(tmp_path: Path) -> None:
    """A path without a file is one clear error."""
    with pytest.raises(config.UnreadableConfig, match="cannot be read"):
        config.web_config_reader(str(tmp_path / "none.yml"))
