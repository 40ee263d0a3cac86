"""Keys and values, locks and timers: what clients send about them, and what they are answered."""
