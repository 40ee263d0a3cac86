"""Notifications: datagrams among the workers of a host, signed packets among hosts."""
