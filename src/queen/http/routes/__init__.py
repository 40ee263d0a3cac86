"""The routes, by what they are about. Each module adds its own to the router."""
