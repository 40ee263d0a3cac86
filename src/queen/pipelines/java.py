"""Whether Spark can run here."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from queen.pipelines.errors import SparkMissing

_LEAST: Final = 17
_VERSION: Final = re.compile(r'version "(\d+)')
_SECONDS: Final = 30.0
_HOW: Final = (
    "Pipelines run on Apache Spark, which needs Java 17 or newer. Install it, for example by\n"
    "  apt install openjdk-17-jre-headless      Debian, Ubuntu\n"
    "  dnf install java-17-openjdk-headless     Fedora, RHEL\n"
    "  brew install openjdk@17                  macOS\n"
    "or set JAVA_HOME to where it is. Everything else of Queen works without it."
)


def require_spark(environ: Mapping[str, str] = os.environ) -> None:
    """Raises `SparkMissing`, which says what to install."""
    if importlib.util.find_spec("pyspark") is None:
        raise SparkMissing("PySpark is not installed: pip install 'queen-mq[spark]'")
    java = find_java(environ)
    if java is None:
        raise SparkMissing(f"no Java was found.\n{_HOW}")
    version = _version(java)
    if version is not None and version < _LEAST:
        raise SparkMissing(f"{java} is Java {version}.\n{_HOW}")


def find_java(environ: Mapping[str, str]) -> str | None:
    """The Java that Spark would start."""
    home = environ.get("JAVA_HOME")
    if home:
        java = Path(home) / "bin" / "java"
        return str(java) if java.is_file() else None
    return shutil.which("java", path=environ.get("PATH", ""))


def _version(java: str) -> int | None:
    """None when it does not say: Spark will find out."""
    try:
        said = subprocess.run([java, "-version"], capture_output=True, text=True, timeout=_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = _VERSION.search(said.stderr + said.stdout)
    if found is None:
        return None
    return int(found[1])
