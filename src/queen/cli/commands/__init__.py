"""The commands of `queen`, one module for each resource; `queen.cli.app` loads them when they are called."""
