"""The HTTP server, authentication, and the API on top of them."""
