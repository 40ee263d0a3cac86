"""Request and response structs of the HTTP API, one module per resource."""
