"""Consuming over a WebSocket: what clients ask, what they are told, and the session behind each connection."""
