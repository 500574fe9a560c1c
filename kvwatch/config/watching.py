"""What may be said about what is watched: GPUs, servers, and how a server's pages are read."""

from __future__ import annotations

import dataclasses
from typing import Any

from kvwatch.config import readers, units
from kvwatch.config.findings import Reject, quoted
from kvwatch.config.nodes import ListNode
from kvwatch.config.readers import BAD, Choice, Custom, ListOf, Place, Text
from kvwatch.config.table import Field, Record, Table, attribute_default, one_of
from kvwatch.model.server import Basis, Evictable, KvCacheState, SchedulerState
from kvwatch.model.settings import (
    AuthSettings,
    GpuSettings,
    GpuSourceKind,
    MatchSettings,
    ServerSettings,
    SloSettings,
    TlsSettings,
)
from kvwatch.sources.servers import kinds

# The engines of the public contract; `auto` asks the server, `mapped` reads by the file's own table.
_FIRST_KINDS = (
    "vllm",
    "sglang",
    "llamacpp",
    "tgi",
    "trtllm",
    "triton",
    "lmdeploy",
    "ollama",
    "dynamo",
    "nim",
    "lmcache",
    "lightllm",
    "mlc",
    "transformers",
    "auto",
    "mapped",
)
# In the order of the documentation; an engine that is added as a file comes after them.
KINDS = _FIRST_KINDS + tuple(kind for kind in kinds() if kind not in _FIRST_KINDS)
# What a `metrics:` table may fill: the figures of the KV cache and the scheduler, and the histograms.
MAPPABLE = (
    *(one.name for one in dataclasses.fields(KvCacheState) if one.name != "weights_bytes"),
    *(one.name for one in dataclasses.fields(SchedulerState)),
    *("ttft", "tpot", "queue", "prompt_length", "generation_length"),
)


def _check_selector(text: str) -> str | None:
    from kvwatch.sources.servers.mapped import parse_selector  # only with a mapped server

    try:
        parse_selector(text)
    except ValueError:
        return 'is not a series selector; write a metric name, name{label="value"}, or name / 100'
    return None


def _check_unit(text: str) -> str | None:
    known = (".service", ".scope", ".slice")
    return None if text.endswith(known) else f"is not a unit's full name; end it with {', '.join(known)}"


def _check_metrics_path(text: str) -> str | None:
    return (
        None if text.startswith("/") and " " not in text else "is not a path on the server; begin it with /"
    )


def _read_expect(place: Place) -> int | tuple[str, ...]:
    if isinstance(place.node, ListNode):
        uuids: tuple[str, ...] = ListOf(item=readers.uuid, expected="a list of UUIDs").read(place)
        return uuids
    text = readers.scalar(place, "a count of GPUs or a list of UUIDs").text
    if not units.is_number(text):
        raise Reject(f"{quoted(text)} is not a count of GPUs; write one like 8, or a list of UUIDs")
    count: int = place.value(readers.integer(1, 1024))
    return count


def _check_dcgm_address(text: str) -> str | None:
    if text.startswith("/"):
        return None
    try:
        units.listen_address(text)
    except Reject:
        return "is not an address; write host:port like 127.0.0.1:5555, or the path of a unix socket"
    return None


def _build_gpus(expect: int | tuple[str, ...] | None = None, **given: Any) -> GpuSettings:
    if isinstance(expect, int):
        return GpuSettings(expect_count=expect, **given)
    return GpuSettings(expect_uuids=expect or (), **given)


GPUS = Table(
    title="gpus",
    help="Where GPU facts come from, and which GPUs must be there.",
    build=_build_gpus,
    fields=(
        Field(
            "source",
            Choice(words=tuple(GpuSourceKind), convert=GpuSourceKind),
            "Where GPU facts come from; `auto` takes NVML where there is a driver",
        ),
        Field(
            "peak_window",
            readers.duration(1.0, 3600.0),
            "Window of the memory extremes (peak used, lowest free)",
            attr="peak_window_s",
        ),
        Field(
            "expect",
            Custom(name="whole number or list of UUID", reader=_read_expect),
            "How many GPUs must be there, or which; a missing one is `gpu_missing`",
            default="none",
        ),
        Field(
            "settle",
            readers.duration(0.0, 3600.0),
            "How long a starting server's device memory must be level before device rules hold",
            attr="settle_s",
        ),
        Field(
            "dcgm_address",
            Text(
                name="host:port or absolute path", expected="host:port or a path", check=_check_dcgm_address
            ),
            "The host engine, where the source is dcgm",
        ),
        Field("dcgm_exporter_url", readers.url, "The page, where the source is dcgm_exporter"),
    ),
)


def _build_auth(
    bearer_file: str | None = None, basic: dict[str, str] | None = None, **_none: Any
) -> AuthSettings:
    return AuthSettings(bearer_file=bearer_file, **(basic or {}))


BASIC = Table(
    title="servers[].auth.basic",
    secret=True,
    help="User name and password.",
    build=dict,
    fields=(
        Field("user", readers.text("a user name"), "The user name", required=True),
        Field(
            "password_file",
            readers.path,
            "The file that holds the password; it never stands in the configuration",
            required=True,
        ),
    ),
)
AUTH = Table(
    title="servers[].auth",
    secret=True,
    help="Credentials, always by file. Exactly one of the two.",
    build=_build_auth,
    check=lambda record: one_of(record, ("bearer_file", "basic"), "auth"),
    fields=(
        Field("bearer_file", readers.path, "A file that holds a bearer token", default="none"),
        Field("basic", BASIC, "User name and a file that holds the password", default="none"),
    ),
)


def _check_tls(record: Record) -> None:
    if record.has("cert_file") != record.has("key_file"):
        record.at("cert_file", "key_file").report("cert_file and key_file belong together; give both")


TLS = Table(
    title="servers[].tls",
    help="TLS towards the server, for https URLs. Certificates are verified.",
    build=TlsSettings,
    check=_check_tls,
    fields=(
        Field("ca_file", readers.path, "Certificates to trust; default: the system's"),
        Field("cert_file", readers.path, "Client certificate for mutual TLS"),
        Field("key_file", readers.path, "Key of the client certificate"),
        Field("server_name", readers.text("a host name"), "Name to verify instead of the URL's host"),
        Field("insecure_skip_verify", readers.boolean, "Accept any certificate (for tests only)"),
    ),
)
MATCH = Table(
    title="servers[].match",
    help="How the server's processes are recognised. Exactly one of the three.",
    build=MatchSettings,
    check=lambda record: one_of(record, ("unit", "cgroup", "cmdline"), "match"),
    fields=(
        Field("unit", Text(name="text", expected="a systemd unit", check=_check_unit), "Its systemd unit"),
        Field("cgroup", readers.text("part of a cgroup path"), "Part of its cgroup path"),
        Field("cmdline", readers.text("part of a command line"), "Part of its command line"),
    ),
)
SLO = Table(
    title="servers[].slo",
    help="Objectives for the 95th percentile over 60 s; the rule `latency_slo` compares with them.",
    build=SloSettings,
    fields=(
        Field("ttft_p95", readers.duration(0.001), "Time to the first token", attr="ttft_p95_s"),
        Field(
            "tpot_p95", readers.duration(0.001), "Time per output token after the first", attr="tpot_p95_s"
        ),
        Field("queue_p95", readers.duration(0.001), "Time in the queue", attr="queue_p95_s"),
    ),
)
_selector = Text(name="series", expected="a series selector", check=_check_selector)
METRICS = Table(
    title="servers[].metrics",
    help="For kind `mapped` only: which series fills which figure. Ratios are 0 to 1, times seconds.",
    build=dict,
    fields=tuple(Field(one, _selector, "Series that reports this", default="none") for one in MAPPABLE),
)
SEMANTICS = Table(
    title="servers[].semantics",
    help="For kind `mapped` only: what `usage_ratio` means.",
    build=dict,
    fields=(
        Field(
            "evictable",
            Choice(words=tuple(Evictable)),
            "How cached but evictable blocks are counted",
            attr="mapping_evictable",
            default="`unknown`",
        ),
        Field(
            "basis",
            Choice(words=tuple(Basis)),
            "What is counted: blocks in use, reservations, or slots",
            attr="mapping_basis",
            default="`occupancy`",
        ),
    ),
)


def _check_server(record: Record) -> None:
    _check_times(record)
    kind = record.get("kind", "auto")
    if kind is BAD:
        return
    if kind == "mapped" and not record.has("metrics"):
        record.at("kind").report("kind mapped needs a `metrics:` table (figure: series)")
    for key in ("metrics", "semantics"):
        if kind != "mapped" and record.has(key):
            record.at(key).report(f"belongs to kind mapped; this server's kind is {kind}")
    metrics = record.get("metrics")
    if kind == "mapped" and isinstance(metrics, Record) and not (metrics.places or metrics.unknown):
        record.at("metrics").report("is empty; name at least one figure and its series")
    if record.has("kv_unified") and kind not in ("llamacpp", "auto"):
        record.at("kv_unified").report(f"belongs to kind llamacpp; this server's kind is {kind}")
    if record.has("tls") and record.good("url") and not record.get("url").startswith("https:"):
        record.at("tls").report("needs an https URL; this server's is http")


def _check_times(record: Record) -> None:
    if not record.good("timeout") or not record.sound("period"):
        return
    period_s, timeout_s = (
        record.get("period", attribute_default(ServerSettings, "period_s")),
        record.get("timeout"),
    )
    if timeout_s > period_s:
        record.at("timeout").report(
            f"{units.show_duration(timeout_s)} is longer than the period, {units.show_duration(period_s)}; "
            "write a shorter timeout or a longer period"
        )


def _build_server(semantics: dict[str, Any] | None = None, **given: Any) -> ServerSettings:
    settings = ServerSettings(**given, **(semantics or {}))
    if "timeout_s" in given:
        return settings
    return dataclasses.replace(settings, timeout_s=min(settings.timeout_s, round(0.8 * settings.period_s, 6)))


SERVER = Table(
    title="servers[]",
    help="One watched server per item.",
    build=_build_server,
    check=_check_server,
    fields=(
        Field("name", readers.name, "Its name in metrics and elsewhere, unique", required=True),
        Field("kind", Choice(words=KINDS), "What it is; `auto` finds out, `mapped` reads by `metrics`"),
        Field("url", readers.server_url, "Where it listens, without credentials", required=True),
        Field("period", readers.duration(0.05, 3600.0), "Interval between readings", attr="period_s"),
        Field(
            "timeout",
            readers.duration(0.01, 3600.0),
            "Total time a reading may take, at most the period",
            attr="timeout_s",
            default="`800ms`, or 0.8 of a shorter period",
        ),
        Field("auth", AUTH, "Credentials towards it"),
        Field("tls", TLS, "TLS towards it"),
        Field(
            "gpus",
            ListOf(item=readers.gpu, expected="a list of GPUs like [0, 1]"),
            "GPUs it runs on: index, UUID, or a prefix of one",
            default="found by process",
        ),
        Field("match", MATCH, "How its processes are recognised"),
        Field("slo", SLO, "Latency objectives"),
        Field("metrics", METRICS, "Kind `mapped`: figure to series", attr="mapping"),
        Field("semantics", SEMANTICS, "Kind `mapped`: what the usage figure means"),
        Field("kv_unified", readers.boolean, "Kind `llamacpp`: one pool for all slots", default="asked"),
        Field(
            "metrics_path",
            Text(name="path", expected="a path on the server", check=_check_metrics_path),
            "Path of the page, where it is not the engine's usual one",
            default="by kind",
        ),
    ),
)
