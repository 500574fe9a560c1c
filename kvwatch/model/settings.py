"""Complete, typed settings: what the configuration file becomes. Pure data with the defaults.

Durations are seconds, sizes bytes, ratios 0..1. The thresholds' provenance is in docs/rules.md.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

from kvwatch.model.level import RuleId

MIB = 1024 * 1024
GIB = 1024 * MIB


class Mode(enum.StrEnum):
    """What kvwatch may do: only watch; decide and log; or act."""

    OBSERVE = "observe"
    ADVISE = "advise"
    ACT = "act"


class OnStale(enum.StrEnum):
    """What a rule does with stale input; never green."""

    HOLD = "hold"  # keep the level for three periods, then unknown
    UNKNOWN = "unknown"
    RED = "red"


class GpuSourceKind(enum.StrEnum):
    """Where GPU facts come from."""

    AUTO = "auto"
    NVML = "nvml"
    DCGM = "dcgm"
    DCGM_EXPORTER = "dcgm_exporter"
    NONE = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class WebSettings:
    """The HTTP server. `config_file` is a web configuration in exporter-toolkit's format."""

    host: str = "127.0.0.1"
    port: int = 9843
    config_file: str | None = None
    enable_lifecycle: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuSettings:
    """GPU source. `expect` is a count or the UUIDs (or prefixes) that must be there."""

    source: GpuSourceKind = GpuSourceKind.AUTO
    peak_window_s: float = 60.0
    expect_count: int | None = None
    expect_uuids: tuple[str, ...] = ()
    settle_s: float = 300.0  # device memory level for this long ends a server's start; the demo lowers it
    dcgm_address: str = "127.0.0.1:5555"  # host:port, or the path of a unix socket
    dcgm_exporter_url: str = "http://127.0.0.1:9400/metrics"
    dcgm_profiling: bool = False  # also watch DCGM's profiling field 1001 (the only utilisation on MIG)


@dataclass(frozen=True, slots=True, kw_only=True)
class AuthSettings:
    """Credentials, always by file: they never stand in the configuration itself."""

    bearer_file: str | None = None
    user: str | None = None
    password_file: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsSettings:
    """TLS towards a server. Certificates are verified unless `insecure_skip_verify`."""

    ca_file: str | None = None
    cert_file: str | None = None
    key_file: str | None = None
    server_name: str | None = None
    insecure_skip_verify: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class MatchSettings:
    """How a server's processes are recognised: by systemd unit, or part of the cgroup or command line."""

    unit: str | None = None
    cgroup: str | None = None
    cmdline: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SloSettings:
    """Objectives in seconds for the 95th percentile over 60 s; None: no objective."""

    ttft_p95_s: float | None = None
    tpot_p95_s: float | None = None
    queue_p95_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """One watched server. `gpus` are indices, UUIDs or UUID prefixes; empty: found by process.

    `kv_unified` tells llama.cpp's unified pool from split slots. `mapping` is the `metrics:`
    table of kind `mapped`: field name -> series selector text. `configured` is False for a
    server that was discovered, whose absence therefore alarms nobody.
    """

    name: str
    kind: str = "auto"
    url: str = "http://127.0.0.1:8000"
    period_s: float = 1.0
    timeout_s: float = 0.8
    auth: AuthSettings = AuthSettings()
    tls: TlsSettings = TlsSettings()
    gpus: tuple[str, ...] = ()
    match: MatchSettings = MatchSettings()
    slo: SloSettings = SloSettings()
    mapping: Mapping[str, str] = field(default_factory=dict)
    mapping_evictable: str = "unknown"
    mapping_basis: str = "occupancy"
    kv_unified: bool | None = None
    metrics_path: str | None = None
    configured: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleSettings:
    """One rule's thresholds and timing; a threshold of None means "never at this level".

    `clear` is the margin under a threshold before a level may fall (None: 0.02 of a ratio,
    5 % of the threshold in other units).
    """

    enabled: bool = True
    yellow: float | None = None
    red: float | None = None
    for_s: float = 0.0
    hold_s: float = 30.0
    clear: float | None = None
    on_stale: OnStale = OnStale.HOLD


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionSettings:
    """One lever: `kind` is the module name in `actions/`, `params` its checked options."""

    kind: str
    params: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class NotifySettings:
    """Run an action when a matching rule changes level ("red", "yellow", "green") or is "restore"d."""

    on: tuple[str, ...]
    rules: tuple[str, ...] = ("*",)
    action: ActionSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetSettings:
    """What may be limited on one server, how, and within which bounds.

    `ceiling` None means `auto`: the server's own limit. `params` belong to the policy.
    """

    server: str
    policy: str
    params: Mapping[str, float] = field(default_factory=dict)
    accept_goodput_loss: bool = False
    floor: int = 4
    ceiling: int | None = None
    lease_s: float = 15.0
    cooldown_s: float = 30.0
    max_moves: int = 4
    moves_window_s: float = 600.0
    via: tuple[ActionSettings, ...] = (ActionSettings(kind="lease"),)
    compact: bool = False  # ask the server's agent to return unused allocator memory when the device needs it


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlSettings:
    """Mode and targets."""

    mode: Mode = Mode.ADVISE
    targets: tuple[TargetSettings, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordSettings:
    """Where reports are recorded; None: nowhere."""

    dir: str | None = None
    max_bytes: int = 256 * MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The whole configuration. `rules` holds an entry for every RuleId (defaults filled in)."""

    tick_s: float = 0.2
    web: WebSettings = WebSettings()
    gpus: GpuSettings = GpuSettings()
    servers: tuple[ServerSettings, ...] = ()
    agents_socket: str | None = None  # None: <runtime dir>/agent.sock
    rules: Mapping[RuleId, RuleSettings] = field(default_factory=dict)
    notify: tuple[NotifySettings, ...] = ()
    control: ControlSettings = ControlSettings()
    record: RecordSettings = RecordSettings()
