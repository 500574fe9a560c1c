"""From a file to settings: defaults, values, places, and what cannot be read."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvwatch import config
from kvwatch.actions import base as actions
from kvwatch.config import nodes
from kvwatch.config.acting import ACTIONS
from kvwatch.config.schema import ROOT
from kvwatch.config.watching import KINDS
from kvwatch.model.level import RuleId
from kvwatch.model.settings import (
    GIB,
    MIB,
    ActionSettings,
    AuthSettings,
    MatchSettings,
    Mode,
    OnStale,
    ServerSettings,
    Settings,
    SloSettings,
    TargetSettings,
)
from kvwatch.sources.servers import mapped, registry

GOOD = Path(__file__).parent.parent / "fixtures" / "config" / "good"
SERVER = "servers: [{name: chat, url: 'http://127.0.0.1:8000'%s}]\n"
TARGET = SERVER % "" + "control: {mode: %s, targets: [{server: chat, policy: %s}]}\n"


def findings(text: str, mode: Mode | None = None) -> list[str]:
    """The findings of a text, as printed."""
    with pytest.raises(config.ConfigError) as caught:
        config.parse(text, "f", mode=mode)
    return [str(one) for one in caught.value.findings]


def outcome(read: Callable[[], Settings]) -> Settings | config.ConfigError | config.UnreadableConfig:
    """The settings, or the one of the two errors that was raised; any other error passes through."""
    try:
        return read()
    except (config.ConfigError, config.UnreadableConfig) as error:
        return error


def test_a_file_of_comments_means_every_default() -> None:
    """No key written is the same as default_settings, which has an entry for every rule."""
    empty = config.load(GOOD / "only_comments.yml")

    assert empty == config.default_settings()
    assert set(empty.rules) == set(RuleId)
    assert replace(empty, rules={}) == Settings()


@pytest.mark.parametrize("text", ["", "\n", " \n\t\n"], ids=["no byte", "a line end", "blanks"])
def test_an_empty_file_is_a_mistake(text: str) -> None:
    """An editor leaves one for a moment while it saves: a reload then must not drop every server."""
    with pytest.raises(config.ConfigError) as told:
        config.parse(text, "kvwatch.yml")

    assert [str(finding).partition(";")[0] for finding in told.value.findings] == [
        "kvwatch.yml:1:1: (yaml): is empty"
    ]


def test_the_contracts_example_has_the_defaults_it_shows() -> None:
    """Every number that the public example shows as a default is the default."""
    shown, default = config.load(GOOD / "contract.yml"), config.default_settings()
    target, plain = shown.control.targets[0], TargetSettings(server="chat", policy="threshold")
    server, bare = shown.servers[0], ServerSettings(name="chat")

    assert (shown.tick_s, shown.web, shown.rules) == (default.tick_s, default.web, default.rules)
    assert shown.gpus == replace(default.gpus, expect_count=8)
    assert shown.control.mode is default.control.mode
    assert shown.record.max_bytes == default.record.max_bytes
    assert (server.period_s, server.timeout_s, server.url) == (bare.period_s, bare.timeout_s, bare.url)
    assert (target.floor, target.lease_s, target.cooldown_s) == (plain.floor, plain.lease_s, plain.cooldown_s)
    without_params = config.parse(TARGET % ("advise", "threshold"), "f").control.targets[0]
    assert target.params == without_params.params


def test_the_contracts_example_is_read_as_it_says() -> None:
    """The values of the public example arrive in the settings."""
    shown = config.load(GOOD / "contract.yml")

    assert shown.servers[0] == ServerSettings(
        name="chat",
        kind="vllm",
        auth=AuthSettings(bearer_file="/run/credentials/…"),
        gpus=("0",),
        match=MatchSettings(unit="vllm.service"),
        slo=SloSettings(ttft_p95_s=2.0, tpot_p95_s=0.06, queue_p95_s=5.0),
    )
    assert shown.agents_socket == "/run/kvwatch/agent.sock"
    assert shown.notify[0].on == ("red", "restore")
    assert shown.notify[0].action.params["argv"] == ("/usr/local/bin/page-me",)
    assert [one.kind for one in shown.control.targets[0].via] == ["lease", "exec"]
    assert shown.control.targets[0].ceiling == 64
    assert shown.record.dir == "/var/lib/kvwatch"


def test_every_key_arrives() -> None:
    """The file with every key once gives the settings it describes."""
    got = config.load(GOOD / "everything.yml")
    chat, own, small, plain = got.servers

    assert (got.web.host, got.web.port, got.web.enable_lifecycle) == ("::1", 9843, True)
    assert got.gpus.expect_uuids == ("GPU-1a2b3c4d", "MIG-5e6f")
    assert chat.auth == own.auth == AuthSettings(user="kvwatch", password_file="/run/secrets/password")
    assert own.mapping["running"] == 'own_requests{state="running", pool="a\\"b"}'
    assert (own.mapping_evictable, own.mapping_basis) == ("free", "reservation")
    assert (small.kv_unified, small.timeout_s, plain.name) == (True, 4.0, "007")
    assert got.rules[RuleId.KV_USAGE].red is None
    assert got.rules[RuleId.KV_USAGE].on_stale is OnStale.UNKNOWN
    assert got.rules[RuleId.DEVICE_HEADROOM].clear == 128 * MIB
    assert got.rules[RuleId.ALLOC_RETRIES].red == 10.0
    assert got.rules[RuleId.RECOMPUTE_TAX] == config.default_settings().rules[RuleId.RECOMPUTE_TAX]
    assert got.notify[0].action == ActionSettings(
        kind="exec", params={"deadline_s": 2.0, "argv": ("/bin/echo", "5", "off", "")}
    )
    assert got.control.targets[0].ceiling is None
    assert [found.compact for found in got.control.targets] == [True, False]
    assert got.record.max_bytes == GIB


def test_the_good_corpus_uses_every_key() -> None:
    """A new key must be added to the file that shows every key."""
    text = (GOOD / "everything.yml").read_text() + (GOOD / "contract.yml").read_text()

    for table in (ROOT, *(one.kind for one in ROOT.fields)):
        for one in getattr(getattr(table, "item", table), "fields", ()):
            if one.key not in set(RuleId):
                assert f"{one.key}:" in text


@pytest.mark.parametrize("kind", KINDS)
def test_every_engine_of_the_contract_is_accepted(kind: str) -> None:
    """No kind the contract names is refused by the configuration."""
    more = ", metrics: {running: my_running}" if kind == "mapped" else ""

    got = config.parse(SERVER % f", kind: {kind}{more}", "f")

    assert got.servers[0].kind == kind


def test_the_lists_of_other_rooms_are_the_same() -> None:
    """What may be mapped, and which kinds there are, is what the adapters say."""
    assert set(config.MAPPABLE) == set(mapped.FIELDS)
    assert set(config.KINDS) == set(registry.known_kinds())
    assert set(ACTIONS) <= set(actions.kinds())


def test_a_short_period_brings_a_shorter_timeout() -> None:
    """The default timeout stays under a period that is shorter than it; a written one is kept."""
    short = config.parse(SERVER % ", period: 500ms", "f").servers[0]
    long = config.parse(SERVER % ", period: 10s", "f").servers[0]

    assert (short.timeout_s, long.timeout_s) == (0.4, 0.8)


def test_an_unwritten_floor_gives_way_to_a_written_limit() -> None:
    """A fixed limit or a ceiling under the default floor is meant, not a mistake."""
    text = (TARGET % ("advise", "fixed")).replace("policy: fixed", "policy: fixed, params: {max_running: 2}")

    assert config.parse(text, "f").control.targets[0].floor == 2


def test_threshold_in_act_needs_consent_also_when_the_command_line_says_act() -> None:
    """The mode that counts is the one that will run."""
    text = TARGET % ("advise", "threshold")

    assert config.parse(text, "f").control.mode is Mode.ADVISE
    assert "accept_goodput_loss" in findings(text, Mode.ACT)[0]
    assert config.parse(TARGET % ("act", "threshold"), "f", mode=Mode.ADVISE) is not None


def test_the_word_on_is_a_key_and_not_a_boolean() -> None:
    """YAML 1.1 reads a bare `on` as true; as the key of a notification it stays a word."""
    got = config.parse("notify: [{on: [red], exec: {argv: [/bin/true]}}]", "f")

    assert got.notify[0].on == ("red",)


@pytest.mark.parametrize("word", ["off", "Off", "NO", "yes", "On", "true"])
def test_words_that_yaml_reads_as_booleans_are_named(word: str) -> None:
    """A mode of `off` is refused with the reason, not silently turned into False."""
    assert f"`{word}` is read as a boolean" in findings(f"control: {{mode: {word}}}")[0]


def test_findings_come_in_the_order_of_the_file() -> None:
    """Findings are sorted by place and printed as FILE:line:col: path: message."""
    got = findings("record: {dir: x}\ntick: 5\nweb: {listen: x}\n")

    assert [one.split(": ")[0] for one in got] == ["f:1:15", "f:2:7", "f:3:15"]


def test_both_parsers_give_the_same_places(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without libyaml the pure Python parser finds the same things at the same places."""
    text = (GOOD.parent / "twenty.yml").read_text()
    fast = findings(text)

    monkeypatch.delattr(yaml, "CSafeLoader")

    assert findings(text) == fast


def test_unreadable_files_are_named(tmp_path: Path) -> None:
    """Missing, not a file, too large, and not UTF-8 are one clear error each, with the path."""
    (tmp_path / "large.yml").write_bytes(b"#" * (config.MAX_FILE_BYTES + 1))
    (tmp_path / "latin.yml").write_bytes("tick: 1s # \u00fc".encode("latin-1"))
    os.mkfifo(tmp_path / "pipe.yml")
    cases = {
        "none.yml": "No such file",
        ".": "not a regular file",
        "pipe.yml": "not a regular file",
        "large.yml": "larger than",
        "latin.yml": "not UTF-8",
    }

    for name, words in cases.items():
        with pytest.raises(config.UnreadableConfig, match=words) as caught:
            config.load(tmp_path / name)
        assert str(tmp_path) in str(caught.value)


def test_other_system_errors_are_unreadable_too(tmp_path: Path) -> None:
    """A path through a file, or with a NUL in it, is refused with the reason; nothing else is raised."""
    (tmp_path / "file").write_text("")

    with pytest.raises(config.UnreadableConfig, match="cannot be read"):
        config.load(tmp_path / "file" / "kvwatch.yml")
    with pytest.raises(config.UnreadableConfig, match="not a valid path"):
        config.load("a\0b")


def test_a_byte_order_mark_does_not_matter(tmp_path: Path) -> None:
    """Files from editors that write a mark are read."""
    (tmp_path / "bom.yml").write_bytes(b"\xef\xbb\xbftick: 1s\n")

    assert config.load(tmp_path / "bom.yml").tick_s == 1.0


def test_alias_bombs_stay_small() -> None:
    """Aliases that multiply to billions are refused after as many nodes as are written."""
    levels = "".join(f"l{i}: &l{i} [{', '.join([f'*l{i - 1}'] * 10)}]\n" for i in range(1, 10))

    assert f"more than {nodes.MAX_NODES}" in findings("l0: &l0 [x]\n" + levels)[0]


def test_the_yaml_module_is_loaded_only_for_a_file() -> None:
    """Defaults cost no YAML parser; who runs without a file does not pay for it."""
    import subprocess
    import sys

    code = (
        "import sys; from kvwatch import config; config.default_settings(); sys.exit('yaml' in sys.modules)"
    )

    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


KEYS = sorted(
    {one.key for one in ROOT.fields} | {"name", "url", "kind", "policy", "on", "exec", "argv", "<<", ""}
)
SCALARS = st.sampled_from(
    [
        "1s",
        "5",
        "off",
        "~",
        "chat",
        "*",
        "http://x",
        "[::1]:1",
        ".inf",
        "-1",
        "70%",
        "1GiB",
        "auto",
        "http://[",
        "/p",
    ]
)
TREES = st.recursive(
    SCALARS | st.text(max_size=6) | st.integers() | st.floats() | st.booleans() | st.none(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(KEYS), inner, max_size=4)
        | st.fixed_dictionaries({}, optional=dict.fromkeys(("server", "params", "via", "metrics"), inner))
    ),
    max_leaves=12,
)


@settings(max_examples=150)
@given(st.dictionaries(st.sampled_from(KEYS), TREES, max_size=5))
def test_any_yaml_is_read_or_has_findings(tree: dict[str, object]) -> None:
    """Well-formed YAML of any shape gives settings or findings, each on one line, and nothing else."""
    got = outcome(lambda: config.parse(yaml.safe_dump(tree), "f"))

    if isinstance(got, config.ConfigError):
        assert got.findings
        assert all("\n" not in str(one) and one.line > 0 and one.col > 0 for one in got.findings)
    else:
        assert isinstance(got, Settings)


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.binary(max_size=200)
    | st.text(alphabet="abk:-[]{}&*!|>'\"%@`#\\ \t\n0~?,\x00\x85\u2028", max_size=60).map(str.encode)
)
def test_any_bytes_are_read_or_refused(tmp_path: Path, data: bytes) -> None:
    """Whatever is in the file: settings, findings, or unreadable."""
    path = tmp_path / "any.yml"
    path.write_bytes(data)

    got = outcome(lambda: config.load(path))

    assert isinstance(got, Settings) or str(got)
