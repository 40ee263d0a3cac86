"""Transactions, and what else commits atomically: staged batches, cycles of streaming queries."""
