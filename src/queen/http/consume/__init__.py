"""Consuming over a WebSocket: requests, answers, and the session of each connection."""
