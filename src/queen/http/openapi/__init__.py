"""The OpenAPI document of the server, made from its routes and what `queen.http.operations` says of each."""
