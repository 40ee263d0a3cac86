"""Acknowledgment: the rules, the fast path, leases, dead letters."""
