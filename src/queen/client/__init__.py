"""The Python client. Import it from the front door: `from queen import Queen`."""

from typing import Any


def __getattr__(name: str) -> Any:
    """Nothing is exported here; but the package of `queen-mq`, installed over this one, expects its own module."""
    if name == "Queen":
        raise ImportError(
            "the distribution queen-mq is installed over queen-broker, and both are the package `queen`: "
            "uninstall both, and install one of them again (Queen of this one: from queen import Queen)"
        )
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
