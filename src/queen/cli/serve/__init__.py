"""`queen serve`: the supervisor, its worker processes and their log."""
