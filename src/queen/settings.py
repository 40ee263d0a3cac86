"""All settings of the server, read once from the environment.

A setting is one field of `Settings`. Its variable is the field's name in upper case; `Declared` gives the
kind of value, the meaning and the unit. The table in docs/settings.md is generated from these declarations.
"""

import dataclasses
import os
import ssl
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_type_hints
from urllib.parse import quote, urlencode

import platformdirs

from queen.errors import SettingsError
from queen.setting_kinds import (
    DATABASE_URLS,
    DURATION_MS,
    FLAG,
    INTERVAL_MS,
    KEYS,
    MODES,
    ORIGINS,
    PATH,
    PEERS,
    QUOTAS,
    ROLES,
    SECONDS,
    TEXT,
    URL,
    URLS,
    WORDS,
    Kind,
    choice,
    whole,
)

SubscriptionMode = Literal["", "all", "new", "new-only"]
ReadyQueues = Literal["on", "off"]
LogLevel = Literal["trace", "debug", "info", "warn", "error"]
LogEncoding = Literal["text", "json", "console"]
JwtAlgorithm = Literal["auto", "HS256", "HS384", "HS512", "RS256", "RS384", "RS512", "ES256", "EdDSA"]
TlsClientAuth = Literal["off", "optional", "required"]


@dataclasses.dataclass(frozen=True, slots=True)
class Declared:
    """The declaration of a setting. `default_text` describes a default that depends on the machine."""

    kind: Kind
    meaning: str
    unit: str = ""
    secret: bool = False
    default_text: str | None = None


def usable_cores() -> int:
    """The cores available to this process, by CPU affinity and cgroup quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
    except (OSError, ValueError):
        return cores
    if quota == "max":
        return cores
    return max(1, min(cores, round(int(quota) / int(period))))


def _default_num_workers() -> int:
    return min(usable_cores(), 8)


def _default_data_dir() -> Path:
    return platformdirs.user_data_path("queen", appauthor=False)


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Settings:
    """The settings of a server, read by `Settings.from_env(os.environ)`."""

    port: Annotated[int, Declared(whole(1, 65535), "TCP port of the HTTP server.")] = 6632
    host: Annotated[
        str,
        Declared(
            TEXT,
            "Address the HTTP server listens on; `0.0.0.0` is every one of this machine.",
            default_text="`0.0.0.0` with `JWT_ENABLED`, else `127.0.0.1`: this machine alone",
        ),
    ] = ""
    num_workers: Annotated[
        int,
        Declared(
            whole(1, 256),
            "Number of worker processes.",
            default_text="the available cores, at most 8",
        ),
    ] = dataclasses.field(default_factory=_default_num_workers)

    shutdown_delay_ms: Annotated[
        int,
        Declared(
            DURATION_MS,
            "On shutdown, how long `/readyz` returns 503 before the server stops accepting connections.",
            "ms",
        ),
    ] = 0

    pg_host: Annotated[
        str,
        Declared(TEXT, "Host of PostgreSQL, or the directory of its Unix socket; unset: the embedded PostgreSQL."),
    ] = ""
    pg_port: Annotated[int, Declared(whole(1, 65535), "Port of PostgreSQL.")] = 5432
    pg_user: Annotated[str, Declared(TEXT, "PostgreSQL user.")] = "postgres"
    pg_password: Annotated[str, Declared(TEXT, "PostgreSQL password.", secret=True)] = ""
    pg_db: Annotated[str, Declared(TEXT, "Name of the PostgreSQL database.")] = "postgres"
    pg_use_ssl: Annotated[bool, Declared(FLAG, "Connect to `PG_HOST` over TLS.")] = False
    pg_ssl_reject_unauthorized: Annotated[
        bool,
        Declared(FLAG, "With TLS, reject a server whose certificate or host name cannot be verified."),
    ] = True
    database_urls: Annotated[
        tuple[str, ...],
        Declared(
            DATABASE_URLS,
            "Database URLs, instead of the `PG_` variables: one, or one per shard, in the order of the shard numbers.",
            secret=True,
        ),
    ] = ()
    queen_data_dir: Annotated[
        Path,
        Declared(
            PATH,
            "Data directory: spool, embedded PostgreSQL, and other local files.",
            default_text="the user's data directory (on Linux `~/.local/share/queen`)",
        ),
    ] = dataclasses.field(default_factory=_default_data_dir)
    db_pool_size: Annotated[int, Declared(whole(1, 1000), "Maximum number of PostgreSQL connections per worker.")] = 10
    db_connection_timeout: Annotated[int, Declared(INTERVAL_MS, "Timeout for connecting to PostgreSQL.", "ms")] = 2000
    db_away_ms: Annotated[
        int,
        Declared(
            INTERVAL_MS,
            "PostgreSQL is considered unavailable when it does not respond for this long: pushes go to the spool, "
            "other requests get 503.",
            "ms",
        ),
    ] = 1500
    db_statement_timeout: Annotated[int, Declared(DURATION_MS, "Statement timeout of PostgreSQL; 0: none.", "ms")] = (
        30000
    )
    db_lock_timeout: Annotated[int, Declared(DURATION_MS, "Lock timeout of PostgreSQL; 0: none.", "ms")] = 10000

    default_timeout: Annotated[int, Declared(DURATION_MS, "Default long-poll timeout of a pop.", "ms")] = 30000
    default_batch_size: Annotated[int, Declared(whole(1, 100000), "Default batch size of a pop.")] = 1
    default_subscription_mode: Annotated[
        SubscriptionMode,
        Declared(
            choice("", "all", "new", "new-only"),
            "Default start position of a new consumer group: empty or `all` for the oldest message, `new` or "
            "`new-only` for messages pushed after its first pop.",
        ),
    ] = ""
    pop_safety_poll_ms: Annotated[
        int,
        Declared(
            INTERVAL_MS,
            "Fallback polling interval of long polls, in case a notification is lost.",
            "ms",
        ),
    ] = 5000
    queen_sql_push: Annotated[
        bool,
        Declared(
            FLAG,
            "Append what transactions push by `SELECT queen.push(…)`; off: it waits for a server where this is on.",
        ),
    ] = True
    sql_push_poll_ms: Annotated[
        int,
        Declared(
            INTERVAL_MS,
            "Fallback polling interval for pushes from SQL, in case a notification is lost.",
            "ms",
        ),
    ] = 1000
    max_body_bytes: Annotated[int, Declared(whole(1, 2**31 - 1), "Maximum size of a request body.", "bytes")] = 67108864

    websocket_origins: Annotated[
        tuple[str, ...],
        Declared(
            ORIGINS,
            "Origins of web pages that may open a WebSocket, besides the server's own host; `*`: any.",
        ),
    ] = ()
    websocket_max_message_bytes: Annotated[
        int, Declared(whole(1024, 2**31 - 1), "Maximum size of a WebSocket message from a client.", "bytes")
    ] = 4194304
    websocket_max_subscriptions: Annotated[
        int, Declared(whole(1, 10000), "Maximum number of subscriptions per WebSocket.")
    ] = 64
    websocket_buffer_bytes: Annotated[
        int,
        Declared(
            whole(1024, 2**31 - 1),
            "Send buffer of a WebSocket; when it is full, no more messages are leased for the client.",
            "bytes",
        ),
    ] = 1048576
    websocket_ping_ms: Annotated[int, Declared(INTERVAL_MS, "Idle time after which a WebSocket is pinged.", "ms")] = (
        20000
    )
    websocket_pong_ms: Annotated[
        int, Declared(INTERVAL_MS, "Ping timeout after which a WebSocket is closed.", "ms")
    ] = 40000
    websocket_drain_ms: Annotated[
        int,
        Declared(DURATION_MS, "On shutdown, how long WebSocket consumers may still ack.", "ms"),
    ] = 2000
    websocket_compression: Annotated[
        bool,
        Declared(FLAG, "Offer permessage-deflate compression on WebSockets; costs much CPU."),
    ] = False

    jwt_enabled: Annotated[
        bool, Declared(FLAG, "Requests need a token (`Authorization: Bearer`) whose role admits what they ask.")
    ] = False
    jwt_algorithm: Annotated[
        JwtAlgorithm,
        Declared(
            choice("auto", "HS256", "HS384", "HS512", "RS256", "RS384", "RS512", "ES256", "EdDSA"),
            "How tokens are signed; `auto`: in any way that a key is set for. `RS256` admits RS384 and RS512 too.",
        ),
    ] = "auto"
    jwt_secret: Annotated[str, Declared(TEXT, "Secret that HS256 tokens are signed with.", secret=True)] = ""
    jwt_public_key: Annotated[
        str, Declared(TEXT, "Public key (PEM) that verifies RS256, ES256 or EdDSA tokens.", default_text="")
    ] = ""
    jwt_jwks_url: Annotated[str, Declared(URL, "Where an identity provider publishes its keys (JWKS).")] = ""
    jwt_jwks_refresh_seconds: Annotated[
        int, Declared(whole(1, 86_400), "How often the keys at `JWT_JWKS_URL` are fetched again.", "s")
    ] = 300
    jwt_issuer: Annotated[
        tuple[str, ...], Declared(WORDS, "Issuers (`iss`) whose tokens are admitted; unset: any.")
    ] = ()
    jwt_audience: Annotated[
        tuple[str, ...], Declared(WORDS, "Audiences (`aud`), one of which a token has to name; unset: any or none.")
    ] = ()
    jwt_clock_skew: Annotated[
        int, Declared(whole(0, 3600), "How far the clocks of those who issue tokens may be off.", "s")
    ] = 30
    jwt_roles_claim: Annotated[str, Declared(TEXT, "Claim that holds one role.")] = "role"
    jwt_roles_array_claim: Annotated[str, Declared(TEXT, "Claim that holds a list of roles.")] = "roles"
    jwt_role_admin: Annotated[str, Declared(TEXT, "What the role `admin` is called in tokens.")] = "admin"
    jwt_role_read_write: Annotated[str, Declared(TEXT, "What the role `read-write` is called in tokens.")] = (
        "read-write"
    )
    jwt_role_read_only: Annotated[str, Declared(TEXT, "What the role `read-only` is called in tokens.")] = "read-only"
    jwt_queues_claim: Annotated[
        str, Declared(TEXT, "Claim that limits a token to queues and topics, a list of patterns such as `orders.*`.")
    ] = "queues"
    jwt_namespaces_claim: Annotated[
        str, Declared(TEXT, "Claim that limits a token to namespaces, a list of patterns.")
    ] = "namespaces"
    jwt_groups_claim: Annotated[
        str,
        Declared(
            TEXT,
            "Claim that limits a token to consumer groups, a list of patterns. Name another if your identity provider "
            "puts groups of people into `groups`.",
        ),
    ] = "groups"
    jwt_skip_paths: Annotated[
        tuple[str, ...],
        Declared(
            WORDS,
            "Paths that need no token; one that ends with `/` stands for all paths below it.",
        ),
    ] = ("/health", "/metrics/prometheus", "/metrics", "/")

    cors_origins: Annotated[
        tuple[str, ...],
        Declared(
            ORIGINS,
            "Web pages that may read answers, besides those of this server's own host; `*` is all of them.",
            default_text="none with `JWT_ENABLED`, else `*`",
        ),
    ] = ()
    allowed_hosts: Annotated[
        tuple[str, ...],
        Declared(
            WORDS,
            "Host names by which this server may be called, without ports; `*` is any.",
            default_text="those of this machine when it listens on 127.0.0.1, else `*`",
        ),
    ] = ()

    queen_memory_mb: Annotated[
        int,
        Declared(
            whole(64, 2**20),
            "What all workers together may hold of requests that arrive, wait or are being answered; beyond it they "
            "are answered 503.",
            "MB",
        ),
    ] = 1024
    max_connections: Annotated[
        int, Declared(whole(1, 10**6), "Connections that each worker may have; more are answered 503.")
    ] = 10_000
    max_connections_per_ip: Annotated[
        int, Declared(whole(0, 10**6), "Connections that one address may have with each worker; 0: no such limit.")
    ] = 0
    max_wait_ms: Annotated[
        int, Declared(INTERVAL_MS, "The longest that a request may wait for messages, whatever it asks for.", "ms")
    ] = 3_600_000

    tls_cert: Annotated[
        str, Declared(TEXT, "File with the certificate (PEM, and those above it); with it the server speaks TLS.")
    ] = ""
    tls_key: Annotated[str, Declared(TEXT, "File with the private key of `TLS_CERT`.")] = ""
    tls_client_ca: Annotated[
        str, Declared(TEXT, "File with the certificates (PEM) that those of clients are signed with.")
    ] = ""
    tls_client_auth: Annotated[
        TlsClientAuth,
        Declared(choice("off", "optional", "required"), "Whether clients show a certificate of `TLS_CLIENT_CA`."),
    ] = "off"
    tls_client_roles: Annotated[
        tuple[tuple[str, str], ...],
        Declared(
            ROLES,
            "Roles of clients by the common name of their certificates, such as `billing:read-write,ops-*:admin`.",
        ),
    ] = ()

    peer_ca: Annotated[
        str,
        Declared(
            TEXT,
            "File with the certificates (PEM) that verify `QUEEN_PEERS` at `https://`; unset: those of the system.",
        ),
    ] = ""
    queen_login: Annotated[
        bool, Declared(FLAG, "The server itself has a login page for people, as `queen proxy` has (see docs/proxy.md).")
    ] = False
    audit_retention_days: Annotated[
        int, Declared(whole(1, 36500), "How long the audit log keeps what administrators did.", "days")
    ] = 365

    dedup_window_seconds: Annotated[
        int,
        Declared(
            whole(1, 2**31 - 1),
            "Default deduplication window of a queue: how long a transactionId is remembered.",
            "s",
        ),
    ] = 3600
    dedup_memory_mb: Annotated[
        int, Declared(whole(1, 2**20), "Memory per worker for the deduplication filter.", "MB")
    ] = 64
    dedup_disk_mb: Annotated[
        int,
        Declared(
            whole(0, 2**24),
            "Disk space per worker in `QUEEN_DATA_DIR` for transactionIds that do not fit into memory.",
            "MB",
        ),
    ] = 1024
    segment_cache_mb: Annotated[
        int, Declared(whole(0, 2**20), "Memory per worker for the cache of recent segments.", "MB")
    ] = 12

    file_buffer_dir: Annotated[
        str,
        Declared(
            TEXT,
            "Directory of the spool, which stores pushes while PostgreSQL is unavailable; must be on a durable disk.",
            default_text="`spool` in `QUEEN_DATA_DIR`",
        ),
    ] = ""
    file_buffer_flush_ms: Annotated[
        int, Declared(INTERVAL_MS, "Interval at which the spool is checked for records to replay.", "ms")
    ] = 100
    file_buffer_max_batch: Annotated[
        int, Declared(whole(1, 10000), "Maximum number of spool records per replay transaction.")
    ] = 100
    file_buffer_events_per_file: Annotated[
        int, Declared(whole(1, 10**6), "Number of records after which a spool file is rotated.")
    ] = 10000
    file_buffer_max_mb: Annotated[
        int,
        Declared(whole(1, 2**20), "Maximum size of the spool of a host; when it is full, pushes get 503.", "MB"),
    ] = 4096

    mqueue_node_id: Annotated[
        int,
        Declared(
            whole(-1, 1023),
            "Node id in the ids of topic items, for the first worker; following workers use the next ones. -1: any.",
        ),
    ] = -1
    namespace_quotas: Annotated[
        tuple[tuple[str, int], ...],
        Declared(
            QUOTAS, "Enqueue quotas of topic namespaces in items per minute, such as `default:10000,payments:5000`."
        ),
    ] = ()

    namespace_courtesy: Annotated[
        int,
        Declared(
            whole(0, 100),
            "Throttle for busy topic namespaces that slow down others: the maximum pause between batches, as a "
            "multiple of the duration of the last batch; 0: no throttle.",
        ),
    ] = 4
    namespace_modes: Annotated[
        tuple[tuple[str, str], ...],
        Declared(
            MODES,
            "Write modes of topic namespaces, `sync` (default) or `buffered`, such as `payments:buffered`.",
        ),
    ] = ()
    max_buffer_length: Annotated[
        int,
        Declared(
            whole(1, 10**9),
            "Maximum number of unflushed items of buffered namespaces per host; when full, enqueues get 503.",
        ),
    ] = 100_000
    wal_dir: Annotated[
        str,
        Declared(
            TEXT,
            "Directory of the write-ahead log of buffered namespaces; must be on a durable local disk.",
            default_text="`topics` in the directory of the spool",
        ),
    ] = ""
    wal_retention: Annotated[
        int,
        Declared(
            SECONDS,
            "How long a file of that log is kept after its flush to PostgreSQL, such as `24h`; 0: deleted at once.",
            "s",
        ),
    ] = 0
    redis_addrs: Annotated[
        tuple[str, ...],
        Declared(
            PEERS,
            "Redis addresses (host:port): one server, the Sentinels, or nodes of a cluster; unset: in-memory fallback.",
        ),
    ] = ()
    redis_password: Annotated[str, Declared(TEXT, "Password of Redis.", secret=True)] = ""
    redis_sentinel_master: Annotated[str, Declared(TEXT, "Master name; `REDIS_ADDRS` are then Sentinels.")] = ""
    redis_cluster_mode: Annotated[bool, Declared(FLAG, "`REDIS_ADDRS` are nodes of a Redis cluster.")] = False
    redis_prefix: Annotated[
        str, Declared(TEXT, "Prefix of Redis keys; must differ between deployments that share a Redis.")
    ] = "queen"
    redis_timeout_ms: Annotated[
        int,
        Declared(
            INTERVAL_MS,
            "Timeout of Redis commands; after a timeout Redis is considered unavailable and bypassed.",
            "ms",
        ),
    ] = 500

    ip_limit_per_minute: Annotated[
        int,
        Declared(
            whole(0, 10**9),
            "Rate limit in requests per minute and client address; 0: none. Counted in Redis, else per worker.",
        ),
    ] = 0
    topic_ready_queues: Annotated[
        ReadyQueues,
        Declared(
            choice("on", "off"),
            "Prefetch buffers (ready queues) for hot topics: less load on PostgreSQL, more on the server. Several "
            "workers need Redis for them.",
        ),
    ] = "off"
    topic_ready_items: Annotated[int, Declared(whole(1, 100_000), "Number of items prefetched per hot topic.")] = 1000

    retention_interval: Annotated[int, Declared(INTERVAL_MS, "Interval of retention runs.", "ms")] = 300000
    retention_batch_size: Annotated[
        int, Declared(whole(1, 10**6), "Maximum number of rows deleted per retention statement.")
    ] = 1000
    rewrite_hot_tables: Annotated[
        bool,
        Declared(
            FLAG,
            "Rewrite small, busy tables when a long-running transaction prevents vacuum. A REPEATABLE READ transaction "
            "that started before sees them empty.",
        ),
    ] = True
    partition_cleanup_days: Annotated[
        int, Declared(whole(1, 36500), "Idle time after which an empty partition is deleted.", "days")
    ] = 30
    eviction_interval: Annotated[int, Declared(INTERVAL_MS, "Interval of eviction runs.", "ms")] = 60000
    eviction_batch_size: Annotated[
        int, Declared(whole(1, 10**6), "Maximum number of rows deleted per eviction statement.")
    ] = 1000

    queen_sync_enabled: Annotated[bool, Declared(FLAG, "Exchange notifications with the peers configured below.")] = (
        True
    )
    queen_udp_peers: Annotated[
        tuple[str, ...],
        Declared(PEERS, "Other hosts on the same database, notified by UDP; the list may include this host."),
    ] = ()
    queen_udp_notify_port: Annotated[
        int,
        Declared(whole(1, 65535), "UDP port for notifications, also the default port of peers."),
    ] = 6633
    queen_peers: Annotated[
        tuple[str, ...],
        Declared(URLS, "Other hosts on the same database, notified by HTTP; the list may include this host."),
    ] = ()
    peer_notify_batch_ms: Annotated[
        int, Declared(whole(0, 10_000), "Batching delay of notifications sent by HTTP.", "ms")
    ] = 10
    queen_sync_secret: Annotated[
        tuple[str, ...],
        Declared(
            KEYS,
            "Shared keys of all hosts, 64 hexadecimal digits each: the first signs notifications, all verify.",
            secret=True,
        ),
    ] = ()
    queen_sync_heartbeat_ms: Annotated[int, Declared(INTERVAL_MS, "Heartbeat interval to peers.", "ms")] = 1000
    queen_sync_dead_threshold_ms: Annotated[
        int, Declared(INTERVAL_MS, "A peer without a heartbeat for this long is considered dead.", "ms")
    ] = 5000
    queen_sync_reconcile_ms: Annotated[
        int,
        Declared(INTERVAL_MS, "Polling interval for changes of queues and groups whose notification was lost.", "ms"),
    ] = 1000

    metrics_sample_interval_ms: Annotated[int, Declared(INTERVAL_MS, "Sampling interval of worker metrics.", "ms")] = (
        1000
    )
    metrics_aggregate_interval_s: Annotated[
        int, Declared(whole(1, 3600), "Interval at which workers write metrics to PostgreSQL.", "s")
    ] = 60
    metrics_retention_days: Annotated[int, Declared(whole(1, 36500), "Retention of metrics history.", "days")] = 90
    metrics_max_queues: Annotated[
        int,
        Declared(
            whole(0, 10**6), "Maximum number of queues in `/metrics/prometheus`: those with the most pending messages."
        ),
    ] = 200
    stats_cache_ms: Annotated[
        int,
        Declared(
            DURATION_MS,
            "Maximum cache time of status responses that took over 5 ms to compute: 100 times the computing time, at "
            "most this, but at least 10 times; 0: no cache.",
            "ms",
        ),
    ] = 2000

    queen_encryption_key: Annotated[
        tuple[str, ...],
        Declared(
            KEYS,
            "Keys for encrypted queues, 64 hexadecimal digits each: the first encrypts, all decrypt.",
            secret=True,
        ),
    ] = ()
    log_level: Annotated[
        LogLevel,
        Declared(choice("trace", "debug", "info", "warn", "error"), "Minimum level of log messages."),
    ] = "info"
    log_encoding: Annotated[
        LogEncoding,
        Declared(
            choice("text", "json", "console"),
            "Log format: plain text (`console` is an alias of `text`), or one JSON object per line.",
        ),
    ] = "text"
    log_slow_ms: Annotated[
        int,
        Declared(
            DURATION_MS,
            "Log requests that take at least this long, except long polls; 0: none.",
            "ms",
        ),
    ] = 0

    @classmethod
    def from_env(cls, environ: Mapping[str, str], **overrides: object) -> Self:
        """Read all settings from `environ`; `overrides` are values by field name and take precedence unless None.

        The variable `X` may also be given as `X_FILE`, a file that contains the value. An empty variable
        counts as unset, except for boolean settings, where it means false.
        """
        items = {item.field: item for item in describe_settings()}
        unknown = overrides.keys() - items.keys()
        if unknown:
            raise SettingsError(f"unknown setting: {', '.join(sorted(unknown))}")
        values: dict[str, Any] = {}
        for name, item in items.items():
            source, given = name, overrides.get(name)
            if given is None:
                source, given = item.variable, look_up(environ, item.variable)
            if given is None:
                continue
            text = given if isinstance(given, str) else item.kind.format(given)
            if text == "" and item.kind.empty_is_unset:
                continue
            values[name] = item.parse(text, source=source)
        return cls(**values)

    def to_env(self) -> dict[str, str]:
        """The settings as variables, secrets included; the inverse of `Settings.from_env`."""
        return {item.variable: item.kind.format(getattr(self, item.field)) for item in describe_settings()}

    @property
    def listen_host(self) -> str:
        """Where to listen: unless somebody said where, a server that anybody may use is for this machine alone."""
        if self.host:
            return self.host
        return "0.0.0.0" if self.is_guarded else "127.0.0.1"

    @property
    def is_guarded(self) -> bool:
        """Whether a request has to say who sends it."""
        return self.jwt_enabled or self.queen_login or self.tls_client_auth == "required"

    @property
    def embedded(self) -> bool:
        """Whether the embedded PostgreSQL is used, because no database is configured."""
        return not self.pg_host and not self.database_urls

    @property
    def spool_dir(self) -> Path:
        """Directory of the spool."""
        return (
            Path(self.file_buffer_dir).expanduser().absolute()
            if self.file_buffer_dir
            else self.queen_data_dir / "spool"
        )

    @property
    def wal_path(self) -> Path:
        """Directory of the write-ahead log of buffered namespaces."""
        return Path(self.wal_dir).expanduser().absolute() if self.wal_dir else self.spool_dir / "topics"

    @property
    def database_dsns(self) -> tuple[str, ...]:
        """The configured databases as connection URLs; empty for the embedded PostgreSQL."""
        if self.database_urls:
            return self.database_urls
        if not self.pg_host:
            return ()
        return (self._dsn_of_pg_variables(),)

    def _dsn_of_pg_variables(self) -> str:
        login = quote(self.pg_user, safe="")
        if self.pg_password:
            login += ":" + quote(self.pg_password, safe="")
        database = quote(self.pg_db, safe="")
        if self.pg_host.startswith("/"):
            # There is no TLS over Unix sockets.
            where = urlencode({"host": self.pg_host, "port": self.pg_port})
            return f"postgresql://{login}@/{database}?{where}"
        host = f"[{self.pg_host}]" if ":" in self.pg_host else self.pg_host
        return f"postgresql://{login}@{host}:{self.pg_port}/{database}?{urlencode(self._tls_parameters())}"

    def _tls_parameters(self) -> dict[str, str]:
        if not self.pg_use_ssl:
            return {"sslmode": "disable"}
        if not self.pg_ssl_reject_unauthorized:
            return {"sslmode": "require"}
        bundle = _certificate_bundle()
        return {"sslmode": "verify-full", "sslrootcert": bundle} if bundle else {"sslmode": "verify-full"}

    def __repr__(self) -> str:
        shown = (f"{item.field}={item.show(self)}" for item in describe_settings())
        return f"Settings({', '.join(shown)})"


@dataclasses.dataclass(frozen=True, slots=True)
class SettingItem:
    """A setting with its declaration."""

    field: str
    kind: Kind
    default_text: str
    unit: str
    meaning: str
    secret: bool

    @property
    def variable(self) -> str:
        return self.field.upper()

    def parse(self, text: str, *, source: str) -> object:
        """Parse a value; `source` is the name used in the error message."""
        try:
            return self.kind.parse(text)
        except ValueError:
            shown = f"({len(text)} characters, not shown)" if self.secret else text
            raise SettingsError(f"{source}={shown}: expected {self.kind.expected}") from None

    def show(self, settings: Settings) -> str:
        """The value in `settings` as printable text, without secrets."""
        text = self.kind.format(getattr(settings, self.field))
        return "(set, not shown)" if text and self.secret else text


def describe_settings() -> Iterator[SettingItem]:
    """All settings, in order of declaration."""
    hints = get_type_hints(Settings, include_extras=True)
    for field in dataclasses.fields(Settings):
        (declared,) = hints[field.name].__metadata__
        yield SettingItem(
            field=field.name,
            kind=declared.kind,
            default_text=declared.default_text or declared.kind.format(field.default),
            unit=declared.unit,
            meaning=declared.meaning,
            secret=declared.secret,
        )


def look_up(environ: Mapping[str, str], variable: str) -> str | None:
    text = environ.get(variable)
    file = environ.get(f"{variable}_FILE")
    if not file:
        return text
    if text:
        raise SettingsError(f"{variable} and {variable}_FILE are both set: keep one of them")
    try:
        return Path(file).read_text().rstrip("\r\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise SettingsError(f"{variable}_FILE={file}: expected a readable file: {reason}") from None


def _certificate_bundle() -> str | None:
    """The system's CA bundle, unless PGSSLROOTCERT or ~/.postgresql/root.crt is set."""
    if os.environ.get("PGSSLROOTCERT") or (Path.home() / ".postgresql" / "root.crt").exists():
        return None
    # OpenSSL's own default is often a directory, but a database URL can only name a file.
    candidates = (
        ssl.get_default_verify_paths().cafile,
        "/etc/ssl/certs/ca-certificates.crt",
        "/etc/pki/tls/certs/ca-bundle.crt",
        "/etc/ssl/cert.pem",
    )
    return next((path for path in candidates if path and Path(path).exists()), None)
