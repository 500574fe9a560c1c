"""Names of evidence: safe as a file and in an address, taken apart again, and found by an alert's labels."""

from __future__ import annotations

import re
from urllib.parse import parse_qsl, quote, urlsplit

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvwatch.catalogue.alert_evidence import PART_MAX, PARTS, coded, link, name, parse, subject
from kvwatch.catalogue.alerts import ALERTS
from kvwatch.model.level import RuleId, Scope

WALL_S = 1_795_996_800.0
texts = st.text(max_size=120)


@given(server=texts, engine=texts, uuid=texts, rule=st.sampled_from(list(RuleId)))
def test_whatever_a_server_calls_itself(server: str, engine: str, uuid: str, rule: RuleId) -> None:
    """A name is one path component of at most 255 bytes, needs no quoting, and says what it is about."""
    scope = Scope(server=server, engine=engine, uuid=uuid)
    made = name(WALL_S, rule.value, scope)
    found = parse(made)

    assert re.fullmatch(r"[0-9][A-Za-z0-9_.~:=-]+", made)
    assert len(f".{made}.json.1234567") <= 255
    assert found is not None
    assert (found.wall_s, found.rule) == (WALL_S, rule.value)
    assert made.partition("-")[2] == subject(rule.value, scope)
    assert found.answers({"rule": rule.value, "server": server, "engine": engine, "uuid": uuid})
    for part in PARTS:
        whole = coded(getattr(scope, part))
        if len(whole) < PART_MAX and "\ud800" not in getattr(scope, part):
            assert found.shown()[part] == getattr(scope, part)


@given(first=texts, second=texts)
def test_two_names_are_not_confused(first: str, second: str) -> None:
    """Different texts are coded differently, long ones by their checksum."""
    assert (coded(first) == coded(second)) == (first == second)


@pytest.mark.parametrize(
    "text",
    ["", "latest", "../../etc/passwd", "20261130T000000Z-gpu_lost-~~GPU-1/../x", "20261130T000000Z-gpu_lost-",
     "20261330T000000Z-gpu_lost-~~", "20261130T000000Z-gpu_lost-~~\n", "20261130T000000Z-GPU-~~", "\x00"],
)  # fmt: skip
def test_what_is_no_name(text: str) -> None:
    """Paths, other files, impossible times and trailing newlines are no names."""
    assert parse(text) is None


def test_a_parameter_that_is_left_out_fits_everything() -> None:
    """An empty parameter means an empty scope, a missing one any."""
    found = parse(name(WALL_S, "recompute_tax", Scope(server="chat", engine="0")))
    assert found is not None

    assert found.answers({})
    assert found.answers({"server": "chat"})
    assert found.answers({"server": "chat", "uuid": ""})
    assert not found.answers({"server": ""})
    assert not found.answers({"rule": "gpu_lost"})


def test_each_page_links_to_its_evidence_and_nothing_else_does() -> None:
    """Alerts that page on a rule carry the link with the labels quoted; tickets and infos carry none."""
    for spec in ALERTS:
        texts = spec.annotations()
        assert ("evidence" in texts) == (spec.rule is not None and spec.severity == "page"), spec.name
        if spec.rule is not None and "evidence" in texts:
            assert texts["evidence"].startswith("http://{{ $labels.instance }}/evidence/latest?rule=")
            for part in PARTS:
                assert f"{part}={{{{ $labels.{part} | urlquery }}}}" in texts["evidence"]


def test_a_link_is_read_back_as_the_labels_it_was_made_of() -> None:
    """The link that a person gets leads to the piece of just these labels."""
    labels = {"server": "chat", "engine": "a b&c=d", "uuid": ""}
    made = link("gpu-1:9843", "recompute_tax", {key: quote(value) for key, value in labels.items()})
    query = dict(parse_qsl(urlsplit(made).query, keep_blank_values=True))
    found = parse(name(WALL_S, "recompute_tax", Scope(server="chat", engine="a b&c=d")))

    assert query == {"rule": "recompute_tax", **labels}
    assert found is not None
    assert found.answers(query)
