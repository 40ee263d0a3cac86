"""How it goes: what was counted and how it was, now and in the past."""
