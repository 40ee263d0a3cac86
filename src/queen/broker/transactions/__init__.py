"""What commits as a whole: transactions, staged batches, cycles of streaming queries."""
