"""The report as JSON."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvwatch.exporters import redact
from kvwatch.exporters.state import dumps, plain, state
from kvwatch.exporters.unknown import unknowns
from kvwatch.model.signal import Forecast, ForecastState
from tests.exporters import sample


def parsed(make=sample.report) -> dict:
    """The state as a strict reader sees it: no NaN, no Infinity."""

    def refuse(text: str) -> None:
        raise AssertionError(f"{text} is no JSON")

    return json.loads(dumps(state(make())), parse_constant=refuse)


@pytest.mark.parametrize("make", [sample.report, sample.empty_report, sample.bench_report])
def test_state_is_strict_json(make) -> None:
    """Every report becomes JSON without NaN and Infinity, one entry per GPU, server, rule and source."""
    found, report = parsed(make), make()

    assert len(found["gpus"]) == len(report.gpus)
    assert len(found["servers"]) == len(report.servers)
    assert len(found["rules"]) == len(report.verdicts)
    assert len(found["sources"]) == len(report.sources)


def test_infinite_and_unknown_are_null_beside_a_word() -> None:
    """A bound that is never reached and one that is not known are both null; the word tells them apart."""
    gpus = parsed()["gpus"]
    rising, lost = gpus[0]["forecast"], gpus[2]["forecast"]

    assert (rising["state"], rising["central_s"], rising["central_state"]) == ("rising", 290.0, "known")
    assert (rising["high_s"], rising["high_state"]) == (None, "never")
    assert (lost["state"], lost["high_s"], lost["high_state"]) == ("unknown", None, "unknown")


def test_unknown_memory_has_a_state_that_says_why() -> None:
    """A lost GPU has no memory but a state; a stale one says that its figures are stale."""
    gpus = parsed()["gpus"]

    assert (gpus[2]["memory"], gpus[2]["state"], gpus[2]["up"]) == (None, "lost", False)
    assert (gpus[5]["memory"], gpus[5]["state"], gpus[5]["freshness"]) == (None, "ok", "stale")
    assert parsed(sample.empty_report)["gpus"][0]["freshness"] == "never"


def test_levels_and_reasons_are_words() -> None:
    """Enumerations are text, so that no reader needs our numbers."""
    rules = parsed()["rules"]

    assert {r["level"] for r in rules} == {"red", "yellow", "green", "unknown"}
    assert rules[0]["reason"] == "crossed"


def test_no_secret_leaves_through_the_state() -> None:
    """Passwords in addresses, keys on command lines and tokens in messages are cut out."""
    text = dumps(state(sample.report())).decode()

    for secret in ("hunter2", "sk-verysecret123", "s3cret", "token=abc"):
        assert secret not in text
    assert "http://127.0.0.1:8000/metrics" in text
    assert "--model meta-llama/Llama-3.1-70B" in text


@pytest.mark.parametrize(
    ("text", "secret"),
    [
        ("vllm serve --api-key abcd1234", "abcd1234"),
        ("vllm serve --api-key=abcd1234 --port 1", "abcd1234"),
        ("env HF_TOKEN=hf_abcdefghij python", "hf_abcdefghij"),
        ("curl -H 'Authorization: Bearer abcdef123456'", "abcdef123456"),
        ("http://u:p4ss@host/path", "p4ss"),
        ("server --hf-token tok123 --x", "tok123"),
        ("x --password 'two words' y", "two words"),
        ('{"client_secret": "abc def"}', "abc def"),
        ("key is sk-proj-abcdefgh12345", "sk-proj-abcdefgh12345"),
        ("https://h/p?access_token=zzz&x=1", "zzz"),
        ("--auth-token=abc", "abc"),
        ("AWS_SECRET_ACCESS_KEY=qqq", "qqq"),
    ],
)
def test_secrets_are_found_by_their_look(text: str, secret: str) -> None:
    """The usual ways to hand a secret to a process are recognised."""
    assert secret not in redact.text(text)


@pytest.mark.parametrize(
    "text",
    [
        "VLLM::EngineCore --max-num-batched-tokens 8192 --tokenizer mistral",
        "python -m sglang.launch_server --model-path /models/monkey --tp 2",
        "keyboard turkey: 3 items",
    ],
)
def test_harmless_command_lines_stay_whole(text: str) -> None:
    """Words that only contain `token` or `key` are no secrets."""
    assert redact.text(text) == text


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters()),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
        max_leaves=10,
    )
)
def test_any_evidence_becomes_json(value: object) -> None:
    """Whatever stands in an event's fields, lone surrogates and infinities included, it becomes JSON."""
    json.loads(dumps(plain(value)))


def test_secret_fields_are_hidden_by_name() -> None:
    """A field whose name says secret is hidden whatever it holds; file names and token counts are not."""
    found = plain(
        {"password": 1, "nested": {"api_key": "x"}, "key_file": "/k", "prompt_tokens": 3, "inf": math.inf}
    )

    assert found == {
        "password": "[hidden]",
        "nested": {"api_key": "[hidden]"},
        "key_file": "/k",
        "prompt_tokens": 3,
        "inf": None,
    }


def test_what_is_unknown_is_said_with_its_reason() -> None:
    """Failed sources, lost and stale GPUs, missing capabilities and unknown rules each give a reason."""
    found = dict(unknowns(sample.report()))

    assert "host engine" in found["source dcgm"]
    assert "Xid 79" in found["memory of GPU 2"]
    assert found["memory of GPU 4"] == "its figures are too old"
    assert "v1" in found["reserved memory of GPU 5"]
    assert found["rule alloc_retries of chat/0"] == "nothing reports this value here"
    assert all(why for why in found.values())


def test_forecast_words_cover_every_state() -> None:
    """Every forecast state survives the way to JSON."""
    from kvwatch.exporters.state import forecast

    assert [forecast(Forecast(state=s))["state"] for s in ForecastState] == [s.value for s in ForecastState]


@pytest.mark.parametrize(
    "unit", ["--", "a-", "key ", "key", "bearer ", "a.", "eyJ-", '-key "', "sk-", "x://", "- "]
)
def test_hostile_names_cannot_stop_the_search_for_secrets(unit: str) -> None:
    """Long texts made to confuse the patterns are searched all the same (a quadratic one would hang here)."""
    assert redact.text(unit * 20_000 + "key")
