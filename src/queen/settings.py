"""All settings of the server, read once from the environment.

A setting is one field of `Settings`. Its variable is the field's name in upper case; `setting` gives its default, the
kind of value, the meaning and the unit. The table in docs/settings.md is generated from these declarations.
"""

import dataclasses
import os
import ssl
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, Self, TypeVar
from urllib.parse import quote, urlencode

import platformdirs

from queen.errors import SettingsError
from queen.setting_kinds import (
    DATABASE_URLS,
    DURATION_MS,
    FLAG,
    HOST_NAMES,
    INTERVAL_MS,
    KEYS,
    MODES,
    ORIGINS,
    PATH,
    PEERS,
    QUOTAS,
    ROLES,
    SECONDS,
    SQS_KEYS,
    TEXT,
    URL,
    URLS,
    WORDS,
    Kind,
    one_of,
    whole,
)

T = TypeVar("T")

SubscriptionMode = Literal["", "all", "new", "new-only"]
ReadyQueues = Literal["on", "off"]
LogLevel = Literal["trace", "debug", "info", "warn", "error"]
LogEncoding = Literal["text", "json", "console"]
JwtAlgorithm = Literal["auto", "HS256", "HS384", "HS512", "RS256", "RS384", "RS512", "ES256", "EdDSA"]
TlsClientAuth = Literal["off", "optional", "required"]


@dataclasses.dataclass(frozen=True, slots=True)
class SettingItem:
    """A setting as it is declared. `default_text` describes its default, also one that depends on the machine."""

    field: str
    kind: Kind
    meaning: str
    unit: str
    secret: bool
    default_text: str

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

    def show(self, settings: "Settings") -> str:
        """The value in `settings` as printable text, without secrets."""
        text = self.kind.format(getattr(settings, self.field))
        return "(set, not shown)" if text and self.secret else text


def setting(
    default: T, kind: Kind, meaning: str, unit: str = "", *, secret: bool = False, default_text: str | None = None
) -> T:
    """A field of `Settings`. `default_text` describes a default that depends on other settings."""
    text = kind.format(default) if default_text is None else default_text
    field: T = dataclasses.field(default=default, metadata=_declared(kind, meaning, unit, secret, text))
    return field


def machine_setting(default: Callable[[], T], kind: Kind, meaning: str, default_text: str) -> T:
    """A setting whose default depends on the machine."""
    field: T = dataclasses.field(default_factory=default, metadata=_declared(kind, meaning, "", False, default_text))
    return field


def _declared(kind: Kind, meaning: str, unit: str, secret: bool, default_text: str) -> dict[str, Any]:
    return {"kind": kind, "meaning": meaning, "unit": unit, "secret": secret, "default_text": default_text}


SYSTEM_DATA_DIR = Path("/var/lib/queen")
"""The data directory of a server that root starts, and which does not run as root."""
_DEFAULT_SHARE_BYTES = 512 << 20
# What a worker takes at rest, without its caches.
_WORKER_BYTES = 72 << 20
_LEAST_SPARE_BYTES = 16 << 20


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
    own = platformdirs.user_data_path("queen", appauthor=False)
    if os.geteuid() == 0 and not any((own / part).exists() for part in ("postgres", "spool")):
        return SYSTEM_DATA_DIR
    return own


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Settings:
    """The settings of a server, read by `Settings.from_env(os.environ)`."""

    port: int = setting(6632, whole(1, 65535), "TCP port of the HTTP server.")
    host: str = setting(
        "",
        TEXT,
        "Address the HTTP server listens on; `0.0.0.0` is every one of this machine.",
        default_text="`0.0.0.0` with `JWT_ENABLED`, else `127.0.0.1`: this machine alone",
    )
    num_workers: int = machine_setting(
        _default_num_workers,
        whole(1, 256),
        "Number of worker processes.",
        default_text="the available cores, at most 8",
    )

    shutdown_delay_ms: int = setting(
        0,
        DURATION_MS,
        "On shutdown, how long `/readyz` returns 503 before the server stops accepting connections.",
        "ms",
    )

    pg_host: str = setting(
        "", TEXT, "Host of PostgreSQL, or the directory of its Unix socket; unset: the embedded PostgreSQL."
    )
    pg_port: int = setting(5432, whole(1, 65535), "Port of PostgreSQL.")
    pg_user: str = setting("postgres", TEXT, "PostgreSQL user.")
    pg_password: str = setting("", TEXT, "PostgreSQL password.", secret=True)
    pg_db: str = setting("postgres", TEXT, "Name of the PostgreSQL database.")
    pg_use_ssl: bool = setting(False, FLAG, "Connect to `PG_HOST` over TLS.")
    pg_ssl_reject_unauthorized: bool = setting(
        True, FLAG, "With TLS, reject a server whose certificate or host name cannot be verified."
    )
    database_urls: tuple[str, ...] = setting(
        (),
        DATABASE_URLS,
        "Database URLs, instead of the `PG_` variables: one, or one per shard, in the order of the shard numbers.",
        secret=True,
    )
    queen_data_dir: Path = machine_setting(
        _default_data_dir,
        PATH,
        "Data directory: spool, embedded PostgreSQL, and other local files.",
        default_text="the user's data directory (on Linux `~/.local/share/queen`); for root `/var/lib/queen`",
    )
    db_pool_size: int = setting(
        10,
        whole(1, 1000),
        "Maximum number of PostgreSQL connections per worker and shard for what is not batched; batches add up to 25.",
    )
    db_connection_timeout: int = setting(2000, INTERVAL_MS, "Timeout for connecting to PostgreSQL.", "ms")
    db_away_ms: int = setting(
        1500,
        INTERVAL_MS,
        "PostgreSQL is considered unavailable when it does not respond for this long: pushes go to the spool, "
        "other requests get 503.",
        "ms",
    )
    db_statement_timeout: int = setting(30000, DURATION_MS, "Statement timeout of PostgreSQL; 0: none.", "ms")
    db_lock_timeout: int = setting(10000, DURATION_MS, "Lock timeout of PostgreSQL; 0: none.", "ms")

    default_timeout: int = setting(30000, DURATION_MS, "Default long-poll timeout of a pop.", "ms")
    default_batch_size: int = setting(1, whole(1, 10_000), "Default batch size of a pop.")
    default_subscription_mode: SubscriptionMode = setting(
        "",
        one_of(SubscriptionMode),
        "Default start position of a new consumer group: empty or `all` for the oldest message, `new` or "
        "`new-only` for messages pushed after its first pop.",
    )
    pop_safety_poll_ms: int = setting(
        5000, INTERVAL_MS, "Fallback polling interval of long polls, in case a notification is lost.", "ms"
    )
    queen_sql_push: bool = setting(
        True,
        FLAG,
        "Append what transactions push by the SQL function `queen.push`; off: it waits for a server where this is on.",
    )
    sql_push_poll_ms: int = setting(
        1000, INTERVAL_MS, "Fallback polling interval for pushes from SQL, in case a notification is lost.", "ms"
    )
    max_body_bytes: int = setting(67108864, whole(1, 2**31 - 1), "Maximum size of a request body.", "bytes")

    websocket_origins: tuple[str, ...] = setting(
        (), ORIGINS, "Origins of web pages that may open a WebSocket, besides the server's own host; `*`: any."
    )
    websocket_max_message_bytes: int = setting(
        4194304, whole(1024, 2**31 - 1), "Maximum size of a WebSocket message from a client.", "bytes"
    )
    websocket_max_subscriptions: int = setting(64, whole(1, 10000), "Maximum number of subscriptions per WebSocket.")
    websocket_buffer_bytes: int = setting(
        1048576,
        whole(1024, 2**31 - 1),
        "Send buffer of a WebSocket; when it is full, no more messages are leased for the client.",
        "bytes",
    )
    websocket_ping_ms: int = setting(20000, INTERVAL_MS, "Idle time after which a WebSocket is pinged.", "ms")
    websocket_pong_ms: int = setting(40000, INTERVAL_MS, "Ping timeout after which a WebSocket is closed.", "ms")
    websocket_drain_ms: int = setting(
        2000, DURATION_MS, "On shutdown, how long WebSocket consumers may still ack.", "ms"
    )
    websocket_compression: bool = setting(
        False, FLAG, "Offer permessage-deflate compression on WebSockets; costs much CPU."
    )

    jwt_enabled: bool = setting(
        False, FLAG, "Require a token (`Authorization: Bearer`) whose role permits the request."
    )
    jwt_algorithm: JwtAlgorithm = setting(
        "auto",
        one_of(JwtAlgorithm),
        "Signature algorithm of tokens; `auto`: any for which a key is set. `RS256` also accepts RS384 and RS512.",
    )
    jwt_secret: str = setting("", TEXT, "Secret for HS256 tokens.", secret=True)
    jwt_public_key: str = setting(
        "", TEXT, "Public key (PEM) that verifies RS256, ES256 or EdDSA tokens.", default_text=""
    )
    jwt_jwks_url: str = setting("", URL, "URL of the key set (JWKS) of an identity provider.")
    jwt_jwks_refresh_seconds: int = setting(
        300, whole(1, 86_400), "Interval at which the keys at `JWT_JWKS_URL` are fetched again.", "s"
    )
    jwt_issuer: tuple[str, ...] = setting((), WORDS, "Accepted issuers (`iss`); unset: any.")
    jwt_audience: tuple[str, ...] = setting(
        (), WORDS, "Accepted audiences (`aud`), one of which a token must name; unset: any or none."
    )
    jwt_clock_skew: int = setting(30, whole(0, 3600), "Tolerated clock skew of token issuers.", "s")
    jwt_roles_claim: str = setting("role", TEXT, "Claim that holds one role.")
    jwt_roles_array_claim: str = setting("roles", TEXT, "Claim that holds a list of roles.")
    jwt_role_admin: str = setting("admin", TEXT, "Name of the role `admin` in tokens.")
    jwt_role_read_write: str = setting("read-write", TEXT, "Name of the role `read-write` in tokens.")
    jwt_role_read_only: str = setting("read-only", TEXT, "Name of the role `read-only` in tokens.")
    jwt_queues_claim: str = setting(
        "queues", TEXT, "Claim that limits a token to queues and topics, a list of patterns such as `orders.*`."
    )
    jwt_namespaces_claim: str = setting(
        "namespaces", TEXT, "Claim that limits a token to namespaces, a list of patterns."
    )
    jwt_groups_claim: str = setting(
        "groups",
        TEXT,
        "Claim that limits a token to consumer groups, a list of patterns. Name another if your identity provider "
        "puts groups of people into `groups`.",
    )
    jwt_skip_paths: tuple[str, ...] = setting(
        ("/health", "/metrics/prometheus", "/metrics", "/"),
        WORDS,
        "Paths that need no token; one that ends with `/` stands for all paths below it.",
    )

    cors_origins: tuple[str, ...] = setting(
        (),
        ORIGINS,
        "Web pages that may read answers, besides those of this server's own host; `*` is all of them.",
        default_text="none with `JWT_ENABLED`, else `*`",
    )
    allowed_hosts: tuple[str, ...] = setting(
        (),
        HOST_NAMES,
        "Host names by which this server may be called, without ports; `*` is any.",
        default_text="those of this machine when it listens on 127.0.0.1, else `*`",
    )

    queen_memory_mb: int = setting(
        0,
        whole(0, 2**20),
        "Memory of all workers together, with caches and what they need at rest; 0: 512 MB per worker. It limits the "
        "bytes of requests and answers held at the same time; beyond that clients get 429 or 503.",
        "MB",
    )
    max_answer_bytes: int = setting(
        16777216,
        whole(65536, 2**31 - 1),
        "Maximum size of the answer of a pop or dequeue: fewer messages than `batch` are leased where they would "
        "exceed it, but at least one. Smaller where `QUEEN_MEMORY_MB` is small.",
        "bytes",
    )
    max_push_items: int = setting(
        100_000, whole(1, 10**7), "Maximum number of messages in a push; more are answered 413."
    )
    max_ack_items: int = setting(
        50_000, whole(1, 10**7), "Maximum number of acknowledgments in a request; more are answered 413."
    )
    max_transaction_operations: int = setting(
        10_000, whole(1, 10**7), "Maximum number of operations in a transaction; more are answered 413."
    )
    max_connections: int = setting(
        10_000, whole(1, 10**6), "Maximum number of connections per worker; more are answered 503."
    )
    max_connections_per_ip: int = setting(
        0, whole(0, 10**6), "Maximum number of connections per client address and worker; 0: unlimited."
    )
    trusted_proxies: int = setting(
        0,
        whole(0, 100),
        "Number of reverse proxies in front of the server: so many entries of `X-Forwarded-For` are trusted (audit "
        "log, log, `IP_LIMIT_PER_MINUTE`, logins), and `X-Forwarded-Proto` (cookies).",
    )
    max_wait_ms: int = setting(
        3_600_000, INTERVAL_MS, "Maximum long-poll timeout; longer timeouts of requests are reduced to it.", "ms"
    )

    tls_cert: str = setting("", TEXT, "File with the certificate chain (PEM); with it the server uses TLS.")
    tls_key: str = setting("", TEXT, "File with the private key of `TLS_CERT`.")
    tls_client_ca: str = setting(
        "", TEXT, "File with the CA certificates (PEM) that client certificates are signed by."
    )
    tls_client_auth: TlsClientAuth = setting(
        "off", one_of(TlsClientAuth), "Whether clients authenticate by a certificate that `TLS_CLIENT_CA` has signed."
    )
    tls_client_roles: tuple[tuple[str, str], ...] = setting(
        (),
        ROLES,
        "Roles of clients by the common name of their certificates, such as `billing:read-write,ops-*:admin`.",
    )

    peer_ca: str = setting(
        "",
        TEXT,
        "File with the CA certificates (PEM) for `QUEEN_PEERS` at `https://`; unset: those of the system.",
    )
    queen_login: bool = setting(
        False, FLAG, "Serve a login page in the server itself, as `queen proxy` does (see docs/proxy.md)."
    )
    jwt_expires_in: str = setting("24h", TEXT, "With `QUEEN_LOGIN`: lifetime of a session, or `never`.")
    node_env: str = setting("", TEXT, "With `QUEEN_LOGIN`: `production` sends cookies over HTTPS only.")
    secure_cookies: bool = setting(False, FLAG, "With `QUEEN_LOGIN`: send cookies over HTTPS only, as with `TLS_CERT`.")
    cookie_domain: str = setting(
        "", TEXT, "With `QUEEN_LOGIN`: domain of the session cookie, valid on all of its hosts."
    )
    google_client_id: str = setting("", TEXT, "With `QUEEN_LOGIN`: client id for signing in with Google.")
    google_client_secret: str = setting("", TEXT, "Secret of `GOOGLE_CLIENT_ID`.", secret=True)
    google_redirect_uri: str = setting(
        "", TEXT, "Redirect URI for Google: `/api/auth/google/callback` of this server, with its host."
    )
    google_allowed_domains: str = setting("", TEXT, "Email domains that may sign in with Google; unset: all.")
    google_allowed_emails: str = setting(
        "", TEXT, "Email addresses, or `/expressions/`, that may sign in with Google; unset: all."
    )
    google_auto_provision: bool = setting(False, FLAG, "Create a user at the first sign-in with Google.")
    google_default_role: str = setting("read-only", TEXT, "Role of users created by `GOOGLE_AUTO_PROVISION`.")
    oidc_issuer: str = setting(
        "", TEXT, "Issuer URL of an OpenID provider to sign in with; its endpoints are discovered."
    )
    oidc_name: str = setting("", TEXT, "Name of the OpenID provider on the login page.")
    oidc_client_id: str = setting("", TEXT, "With `QUEEN_LOGIN`: client id at the OpenID provider.")
    oidc_client_secret: str = setting("", TEXT, "Secret of `OIDC_CLIENT_ID`.", secret=True)
    oidc_redirect_uri: str = setting(
        "", TEXT, "Redirect URI for the OpenID provider: `/api/auth/oidc/callback` of this server, with its host."
    )
    oidc_allowed_domains: str = setting(
        "", TEXT, "Email domains that may sign in with the OpenID provider; unset: all."
    )
    oidc_allowed_emails: str = setting(
        "", TEXT, "Email addresses, or `/expressions/`, that may sign in with the OpenID provider; unset: all."
    )
    oidc_auto_provision: bool = setting(False, FLAG, "Create a user at the first sign-in with the OpenID provider.")
    oidc_default_role: str = setting("read-only", TEXT, "Role of users created by `OIDC_AUTO_PROVISION`.")
    forward_auth_enabled: bool = setting(
        False,
        FLAG,
        "With `QUEEN_LOGIN`: answer `/api/auth/forward-auth`, by which a reverse proxy authenticates requests.",
    )
    forward_auth_emit_headers: str = setting(
        "Authorization",
        TEXT,
        "Headers in the answer to forward authentication: also `X-Auth-User`, `-Email`, `-Sub`, `-Role`, `-Groups`.",
    )
    forward_auth_always_mint: bool = setting(
        False, FLAG, "Forward authentication: services get a token issued by this server in place of the caller's."
    )
    forward_auth_allowed_redirect_hosts: str = setting(
        "", TEXT, "Hosts that a login may redirect to, besides this one and `COOKIE_DOMAIN`."
    )
    auth_host: str = setting("", TEXT, "Forward authentication: host of the login page, where it has one of its own.")
    internal_jwt_signing_key: str = setting(
        "", TEXT, "Forward authentication: secret for issued tokens.", secret=True, default_text="`JWT_SECRET`"
    )
    internal_jwt_private_key_pem: str = setting(
        "",
        TEXT,
        "Forward authentication: RSA, EC (P-256, P-384) or Ed25519 key (PEM) for issued tokens, instead of the secret.",
        secret=True,
    )
    internal_jwt_issuer: str = setting("queen-proxy", TEXT, "Forward authentication: issuer (`iss`) of issued tokens.")
    internal_jwt_audience: str = setting("", TEXT, "Forward authentication: audience (`aud`) of issued tokens.")
    internal_jwt_expires_in: str = setting("15m", TEXT, "Forward authentication: lifetime of issued tokens.")
    internal_jwt_claims: str = setting(
        "sub:sub,role:role,email:email,preferred_username:username",
        TEXT,
        "Forward authentication: claims of issued tokens, and the fields that they are filled with.",
    )
    queen_sqs: bool = setting(False, FLAG, "Serve Amazon's SQS at `/sqs` (see docs/sqs.md).")
    queen_sqs_keys: tuple[tuple[str, str, str, tuple[str, ...]], ...] = setting(
        (),
        SQS_KEYS,
        "Keys that SQS clients sign with, such as `AKIAMAIL:secret:read-write:mail-*;orders`: id, secret, role, and "
        "patterns of the queues it is for (unset: all); unset: no signature is required.",
        secret=True,
    )
    queen_sqs_in_flight: int = setting(
        120_000,
        whole(0, 2**31 - 1),
        "Approximate maximum number of messages in flight (received and not deleted) per SQS queue; 0: unlimited.",
        "messages",
    )
    audit_retention_days: int = setting(365, whole(1, 36500), "Retention of the audit log.", "days")

    dedup_window_seconds: int = setting(
        3600,
        whole(1, 2**31 - 1),
        "Default deduplication window of a queue: how long a transactionId is remembered.",
        "s",
    )
    dedup_memory_mb: int = setting(64, whole(1, 2**20), "Memory per worker for the deduplication filter.", "MB")
    dedup_disk_mb: int = setting(
        1024,
        whole(0, 2**24),
        "Disk space per worker in `QUEEN_DATA_DIR` for transactionIds that do not fit into memory.",
        "MB",
    )
    segment_cache_mb: int = setting(12, whole(0, 2**20), "Memory per worker for the cache of recent segments.", "MB")

    file_buffer_dir: str = setting(
        "",
        TEXT,
        "Directory of the spool, which stores pushes while PostgreSQL is unavailable; must be on a durable disk.",
        default_text="`spool` in `QUEEN_DATA_DIR`",
    )
    file_buffer_flush_ms: int = setting(
        100, INTERVAL_MS, "Interval at which the spool is checked for records to replay.", "ms"
    )
    file_buffer_max_batch: int = setting(
        100, whole(1, 10000), "Maximum number of spool records per replay transaction."
    )
    file_buffer_events_per_file: int = setting(
        10000, whole(1, 10**6), "Number of records after which a spool file is rotated."
    )
    file_buffer_max_mb: int = setting(
        4096, whole(1, 2**20), "Maximum size of the spool of a host; when it is full, pushes get 503.", "MB"
    )

    mqueue_node_id: int = setting(
        -1,
        whole(-1, 1023),
        "Node id in the ids of topic items, for the first worker; following workers use the next ones. -1: any.",
    )
    namespace_quotas: tuple[tuple[str, int], ...] = setting(
        (), QUOTAS, "Enqueue quotas of topic namespaces in items per minute, such as `default:10000,payments:5000`."
    )

    namespace_courtesy: int = setting(
        4,
        whole(0, 100),
        "Throttle for busy topic namespaces that slow down others: the maximum pause between batches, as a "
        "multiple of the duration of the last batch; 0: no throttle.",
    )
    namespace_modes: tuple[tuple[str, str], ...] = setting(
        (), MODES, "Write modes of topic namespaces, `sync` (default) or `buffered`, such as `payments:buffered`."
    )
    max_buffer_length: int = setting(
        100_000,
        whole(1, 10**9),
        "Maximum number of unflushed items of buffered namespaces per host; when full, enqueues get 503.",
    )
    wal_dir: str = setting(
        "",
        TEXT,
        "Directory of the write-ahead log of buffered namespaces; must be on a durable local disk.",
        default_text="`topics` in the directory of the spool",
    )
    wal_retention: int = setting(
        0,
        SECONDS,
        "How long a file of that log is kept after its flush to PostgreSQL, such as `24h`; 0: deleted at once.",
        "s",
    )
    redis_addrs: tuple[str, ...] = setting(
        (),
        PEERS,
        "Redis addresses (host:port): one server, the Sentinels, or nodes of a cluster; unset: in-memory fallback.",
    )
    redis_password: str = setting("", TEXT, "Password of Redis.", secret=True)
    redis_sentinel_master: str = setting("", TEXT, "Master name; `REDIS_ADDRS` are then Sentinels.")
    redis_cluster_mode: bool = setting(False, FLAG, "`REDIS_ADDRS` are nodes of a Redis cluster.")
    redis_prefix: str = setting(
        "queen", TEXT, "Prefix of Redis keys; must differ between deployments that share a Redis."
    )
    redis_timeout_ms: int = setting(
        500,
        INTERVAL_MS,
        "Timeout of Redis commands; after a timeout Redis is considered unavailable and bypassed.",
        "ms",
    )

    ip_limit_per_minute: int = setting(
        0,
        whole(0, 10**9),
        "Rate limit in requests per minute and client address; 0: none. Counted in Redis, else per worker.",
    )
    topic_ready_queues: ReadyQueues = setting(
        "off",
        one_of(ReadyQueues),
        "Prefetch buffers (ready queues) for hot topics: less load on PostgreSQL, more on the server. Several "
        "workers need Redis for them.",
    )
    topic_ready_items: int = setting(1000, whole(1, 100_000), "Number of items prefetched per hot topic.")

    retention_interval: int = setting(300000, INTERVAL_MS, "Interval of retention runs.", "ms")
    retention_batch_size: int = setting(
        1000, whole(1, 10**6), "Maximum number of rows deleted per retention statement."
    )
    rewrite_hot_tables: bool = setting(
        True,
        FLAG,
        "Rewrite small, busy tables when a long-running transaction prevents vacuum. A REPEATABLE READ transaction "
        "that started before sees them empty.",
    )
    partition_cleanup_days: int = setting(
        30, whole(1, 36500), "Idle time after which an empty partition is deleted.", "days"
    )
    eviction_interval: int = setting(60000, INTERVAL_MS, "Interval of eviction runs.", "ms")
    eviction_batch_size: int = setting(1000, whole(1, 10**6), "Maximum number of rows deleted per eviction statement.")

    queen_sync_enabled: bool = setting(True, FLAG, "Exchange notifications with the peers configured below.")
    queen_udp_peers: tuple[str, ...] = setting(
        (), PEERS, "Other hosts on the same database, notified by UDP; the list may include this host."
    )
    queen_udp_notify_port: int = setting(
        6633, whole(1, 65535), "UDP port for notifications, also the default port of peers."
    )
    queen_peers: tuple[str, ...] = setting(
        (), URLS, "Other hosts on the same database, notified by HTTP; the list may include this host."
    )
    peer_notify_batch_ms: int = setting(10, whole(0, 10_000), "Batching delay of notifications sent by HTTP.", "ms")
    queen_sync_secret: tuple[str, ...] = setting(
        (),
        KEYS,
        "Shared keys of all hosts, 64 hexadecimal digits each: the first signs notifications, all verify.",
        secret=True,
    )
    queen_sync_heartbeat_ms: int = setting(1000, INTERVAL_MS, "Heartbeat interval to peers.", "ms")
    queen_sync_dead_threshold_ms: int = setting(
        5000, INTERVAL_MS, "A peer without a heartbeat for this long is considered dead.", "ms"
    )
    queen_sync_reconcile_ms: int = setting(
        1000, INTERVAL_MS, "Polling interval for changes of queues and groups whose notification was lost.", "ms"
    )

    metrics_sample_interval_ms: int = setting(1000, INTERVAL_MS, "Sampling interval of worker metrics.", "ms")
    metrics_aggregate_interval_s: int = setting(
        60, whole(1, 3600), "Interval at which workers write metrics to PostgreSQL.", "s"
    )
    metrics_retention_days: int = setting(90, whole(1, 36500), "Retention of metrics history.", "days")
    metrics_max_queues: int = setting(
        200, whole(0, 10**6), "Maximum number of queues in `/metrics/prometheus`: those with the most pending messages."
    )
    stats_cache_ms: int = setting(
        2000,
        DURATION_MS,
        "Maximum cache time of status responses that took over 5 ms to compute: 100 times the computing time, at "
        "most this, but at least 10 times; 0: no cache. Counts of all queues and groups: up to 2.5 times as long.",
        "ms",
    )

    queen_encryption_key: tuple[str, ...] = setting(
        (), KEYS, "Keys for encrypted queues, 64 hexadecimal digits each: the first encrypts, all decrypt.", secret=True
    )
    log_level: LogLevel = setting("info", one_of(LogLevel), "Minimum level of log messages.")
    log_encoding: LogEncoding = setting(
        "text",
        one_of(LogEncoding),
        "Log format: plain text (`console` is an alias of `text`), or one JSON object per line.",
    )
    log_slow_ms: int = setting(
        0, DURATION_MS, "Log requests that take at least this long, except long polls; 0: none.", "ms"
    )

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
        """The address to listen on: without authentication and unless HOST is set, this machine alone."""
        if self.host:
            return self.host
        return "0.0.0.0" if self.is_guarded else "127.0.0.1"

    @property
    def is_guarded(self) -> bool:
        """Whether requests have to be authenticated."""
        return self.jwt_enabled or self.queen_login or self.tls_client_auth == "required"

    @property
    def spare_memory_bytes(self) -> int:
        """What a worker may hold beside what it takes at rest: for requests, answers, and what is made of them."""
        share = (self.queen_memory_mb << 20) // self.num_workers if self.queen_memory_mb else _DEFAULT_SHARE_BYTES
        rest = _WORKER_BYTES + ((self.dedup_memory_mb + self.segment_cache_mb) << 20)
        # However little there is: with less it could do nothing.
        return max(share - rest, share // 4, _LEAST_SPARE_BYTES)

    @property
    def body_bytes(self) -> int:
        """What the body of a request may have, as it comes and unpacked."""
        return min(self.max_body_bytes, self.spare_memory_bytes // 2)

    @property
    def unpacked_bytes(self) -> int:
        """What compressed bodies that are served may have together in one worker, unpacked."""
        return self.spare_memory_bytes // 8

    @property
    def answer_bytes(self) -> int:
        """Where the answer of a pop ends. There are several copies of it while it is made."""
        return min(self.max_answer_bytes, self.spare_memory_bytes // 12)

    @property
    def state_bytes(self) -> int:
        """What the state of a streaming query may have that is read at a time: more than one cycle may write."""
        return min(self.max_body_bytes, self.spare_memory_bytes // 4)

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


def describe_settings() -> Iterator[SettingItem]:
    """All settings, in order of declaration."""
    for field in dataclasses.fields(Settings):
        yield SettingItem(field.name, **field.metadata)


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
