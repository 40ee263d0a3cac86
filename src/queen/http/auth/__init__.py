"""Who may ask: tokens, origins, and limits per client address."""
