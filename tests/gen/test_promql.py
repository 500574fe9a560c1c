"""Expressions are built from the catalogue, so a wrong name cannot be written."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvwatch.catalogue.alert_spec import metric
from kvwatch.catalogue.promql import (
    ExpressionError,
    increase,
    label_values,
    max_by,
    number,
    quote,
    rate,
    regex,
    series,
    unlike,
)


def test_a_series_is_selected_by_labels_it_has() -> None:
    """Matchers come out in the order given, with their operator."""
    built = series(metric("rule_level"), rule="gpu_xid", server=unlike(""), gpu=regex("0|1"))

    assert built.text == 'kvwatch_rule_level{rule="gpu_xid", server!="", gpu=~"0|1"}'


def test_a_wrong_label_is_refused() -> None:
    """The error names the metric, the label, and the labels there are."""
    with pytest.raises(
        ExpressionError, match=r"kvwatch_gpu_up: no label server; it has gpu, instance, job, uuid"
    ):
        series(metric("gpu_up"), server="chat")


def test_a_wrong_metric_is_refused() -> None:
    """A metric that is not in the catalogue cannot be named."""
    with pytest.raises(KeyError, match="kvwatch_gpu_uptime"):
        metric("gpu_uptime")


def test_aggregating_by_a_label_that_is_gone_is_refused() -> None:
    """After an aggregation only its labels remain."""
    by_host = max_by(series(metric("gpu_up")), "instance")

    with pytest.raises(ExpressionError, match="no label gpu"):
        max_by(by_host, "gpu")


def test_matching_on_a_label_that_one_side_lacks_is_refused() -> None:
    """`on` is checked against both sides."""
    left, right = series(metric("gpu_up")), series(metric("server_up"))

    with pytest.raises(ExpressionError, match="no label gpu"):
        left.where(right, on=("instance", "gpu"))


@pytest.mark.parametrize("function", [rate, increase], ids=["rate", "increase"])
def test_only_counters_have_a_rate(function: object) -> None:
    """A rate of a gauge is refused; of a counter it is written."""
    assert callable(function)
    assert function(series(metric("ticks_missed_total")), "5m").text.endswith(
        "(kvwatch_ticks_missed_total[5m])"
    )
    with pytest.raises(ExpressionError, match="not a counter"):
        function(series(metric("gpu_up")), "5m")


def test_operands_are_bracketed() -> None:
    """An expression inside another keeps its meaning."""
    gone = series(metric("source_up")).eq(0)
    rule = series(metric("rule_level")).ge(1)

    assert gone.where(rule, on=("instance",)).text == (
        "(kvwatch_source_up == 0) and on (instance) (kvwatch_rule_level >= 1)"
    )


def test_variable_queries_are_checked_too() -> None:
    """A dashboard variable over a label that does not exist is refused."""
    assert label_values(metric("gpu_up"), "gpu") == "label_values(kvwatch_gpu_up, gpu)"
    with pytest.raises(ExpressionError):
        label_values(metric("gpu_up"), "server")


@given(st.text())
def test_quoting_keeps_the_value(value: str) -> None:
    """A quoted value has no bare quote or newline inside, and unquotes to itself."""
    inner = quote(value)[1:-1]

    assert "\n" not in inner
    assert (
        inner.replace("\\\\", "\0").replace('\\"', '"').replace("\\n", "\n").replace("\0", "\\") == value
        or "\0" in value
    )


@given(st.floats(allow_nan=False, allow_infinity=False, width=32))
def test_numbers_survive(value: float) -> None:
    """A number reads back as itself."""
    assert float(number(value)) == value
