-- People who log in, and their sessions.

-- name: lock_users_schema
-- While the tables are made.
SELECT pg_advisory_xact_lock(hashtext('queen_proxy'));

-- name: users_ping
-- Whether PostgreSQL answers.
SELECT 1;

-- name: user_by_name
-- A user by its name.
SELECT * FROM queen_proxy.users WHERE username = $1;

-- name: user_by_google
-- A user by its subject at Google.
SELECT * FROM queen_proxy.users WHERE google_sub = $1;

-- name: user_by_identity
-- A user by its issuer and subject.
SELECT * FROM queen_proxy.users WHERE oidc_identity = $1;

-- name: user_by_email
-- A user by its address, however it is written.
SELECT * FROM queen_proxy.users WHERE lower(email) = lower($1);

-- name: all_users
-- Every user, with how many sessions are open.
SELECT u.*, count(s.id) FILTER (WHERE s.revoked_at IS NULL AND (s.expires_at IS NULL OR s.expires_at > now())) AS sessions
FROM queen_proxy.users u LEFT JOIN queen_proxy.sessions s ON s.user_id = u.id
GROUP BY u.id ORDER BY u.username;

-- name: create_user
-- No row: the name or the email is taken.
INSERT INTO queen_proxy.users (username, password_hash, role, email, google_sub, oidc_identity, auth_provider)
VALUES ($1, $2, $3, $4, $5, $6, $7)
ON CONFLICT DO NOTHING
RETURNING *;

-- name: link_google
-- Let a user sign in with Google from now on. No row: it is linked to another account there.
UPDATE queen_proxy.users SET google_sub = $2, updated_at = now()
WHERE id = $1 AND (google_sub IS NULL OR google_sub = $2)
RETURNING id;

-- name: link_identity
-- Let a user sign in with a provider from now on. No row: it is linked to another account of the same issuer.
UPDATE queen_proxy.users SET oidc_identity = $2, updated_at = now()
WHERE id = $1
  AND (oidc_identity IS NULL OR oidc_identity = $2
       OR split_part(oidc_identity, ' ', 1) <> split_part($2, ' ', 1))
RETURNING id;

-- name: set_password
-- A new hash; the user is no longer locked.
UPDATE queen_proxy.users
SET password_hash = $2, failed_logins = 0, locked_until = NULL, updated_at = now()
WHERE id = $1;

-- name: set_role
-- Another role.
UPDATE queen_proxy.users SET role = $2, updated_at = now() WHERE id = $1;

-- name: set_disabled
-- Keep a user out, or let it in again.
UPDATE queen_proxy.users SET disabled = $2, updated_at = now() WHERE id = $1;

-- name: delete_user
-- A user with its sessions.
DELETE FROM queen_proxy.users WHERE id = $1;

-- name: login_failed
-- From the fifth failure in a row on, logins are locked: for 1 minute, then twice as long each time, up to 15.
UPDATE queen_proxy.users
SET failed_logins = failed_logins + 1,
    locked_until = CASE WHEN failed_logins + 1 >= 5
        THEN now() + least(interval '15 minutes', interval '1 minute' * power(2, least(failed_logins + 1 - 5, 10))) END
WHERE id = $1;

-- name: login_succeeded
-- Forget the failures before.
UPDATE queen_proxy.users SET failed_logins = 0, locked_until = NULL WHERE id = $1 AND failed_logins > 0;

-- name: begin_session
-- A token was issued.
INSERT INTO queen_proxy.sessions (user_id, token_jti, expires_at, address, description) VALUES ($1, $2, $3, $4, $5);

-- name: live_session
-- The user of a session that was neither ended nor revoked, if it may still log in.
SELECT u.*
FROM queen_proxy.sessions s JOIN queen_proxy.users u ON u.id = s.user_id
WHERE s.token_jti = $1 AND s.revoked_at IS NULL AND (s.expires_at IS NULL OR s.expires_at > now()) AND NOT u.disabled;

-- name: revoke_session
-- End one session.
UPDATE queen_proxy.sessions SET revoked_at = now() WHERE token_jti = $1 AND revoked_at IS NULL;

-- name: revoke_sessions
-- End all sessions of a user.
UPDATE queen_proxy.sessions SET revoked_at = now() WHERE user_id = $1 AND revoked_at IS NULL;

-- name: sessions_of
-- The sessions of a user that are open.
SELECT token_jti, created_at, expires_at, address, description
FROM queen_proxy.sessions
WHERE user_id = $1 AND revoked_at IS NULL AND (expires_at IS NULL OR expires_at > now())
ORDER BY created_at;

-- name: forget_sessions
-- Those that ended or were revoked more than a week ago.
DELETE FROM queen_proxy.sessions
WHERE least(expires_at, revoked_at) < now() - interval '7 days';
