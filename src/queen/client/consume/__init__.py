"""Consuming: pops over HTTP or WebSocket, the loop around the handler, acknowledgments."""
