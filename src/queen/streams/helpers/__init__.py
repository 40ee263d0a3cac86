"""Ready-made gates."""

from queen.streams.helpers.rate_limiter import sliding_window_gate, token_bucket_gate

__all__ = ["sliding_window_gate", "token_bucket_gate"]
