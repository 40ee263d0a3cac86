"""Access control: tokens, origins, and limits per client address."""
