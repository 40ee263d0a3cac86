"""The Python client. Import it from the front door: `from queen import Queen`."""
