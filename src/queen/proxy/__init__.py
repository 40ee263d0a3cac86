"""Logging in: users, sessions, OpenID providers, and the reverse proxy in front of a server."""
