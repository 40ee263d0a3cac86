"""Pop: lanes of ready partitions, waiting requests, and the claims that lease messages to them."""
