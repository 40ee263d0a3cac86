-- People who log in, their sessions, and what administrators did. Idempotent: the proxy applies it too, and the tables
-- of users may be those that an earlier proxy made.

CREATE SCHEMA IF NOT EXISTS queen;
CREATE SCHEMA IF NOT EXISTS queen_proxy;

CREATE TABLE IF NOT EXISTS queen_proxy.users (
    id serial PRIMARY KEY,
    username varchar(255) NOT NULL UNIQUE,
    password_hash varchar(255),
    role varchar(50) NOT NULL CHECK (role IN ('admin', 'read-write', 'read-only')),
    email varchar(255) UNIQUE,
    google_sub varchar(255) UNIQUE,
    auth_provider varchar(50) NOT NULL DEFAULT 'local',
    created_at timestamptz NOT NULL DEFAULT now(),
    updated_at timestamptz NOT NULL DEFAULT now()
);
ALTER TABLE queen_proxy.users
    ADD COLUMN IF NOT EXISTS oidc_identity text UNIQUE,
    ADD COLUMN IF NOT EXISTS disabled boolean NOT NULL DEFAULT false,
    ADD COLUMN IF NOT EXISTS failed_logins integer NOT NULL DEFAULT 0,
    ADD COLUMN IF NOT EXISTS locked_until timestamptz;
COMMENT ON COLUMN queen_proxy.users.password_hash IS 'argon2id, or bcrypt until the next login; null: no password.';
COMMENT ON COLUMN queen_proxy.users.oidc_identity IS 'Issuer and subject of an OpenID provider, separated by a space.';

CREATE TABLE IF NOT EXISTS queen_proxy.sessions (
    id serial PRIMARY KEY,
    user_id integer REFERENCES queen_proxy.users(id) ON DELETE CASCADE,
    token_jti varchar(255) NOT NULL UNIQUE,
    expires_at timestamptz,
    created_at timestamptz NOT NULL DEFAULT now()
);
ALTER TABLE queen_proxy.sessions
    ALTER COLUMN expires_at DROP NOT NULL,
    ADD COLUMN IF NOT EXISTS revoked_at timestamptz,
    ADD COLUMN IF NOT EXISTS address text,
    ADD COLUMN IF NOT EXISTS description text;
CREATE INDEX IF NOT EXISTS sessions_by_user ON queen_proxy.sessions (user_id);
COMMENT ON COLUMN queen_proxy.sessions.expires_at IS 'null: a token that never expires.';

CREATE TABLE IF NOT EXISTS queen.audit (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    at timestamptz NOT NULL DEFAULT clock_timestamp(),
    actor text,
    address text NOT NULL DEFAULT '',
    action text NOT NULL,
    object text NOT NULL DEFAULT '',
    status integer,
    before jsonb,
    after jsonb
);
CREATE INDEX IF NOT EXISTS audit_by_time ON queen.audit (at);
COMMENT ON TABLE queen.audit IS 'What administrators changed, and who logged in.';
COMMENT ON COLUMN queen.audit.actor IS 'Subject of the token; null: authentication was off.';
