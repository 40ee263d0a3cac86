"""Print what pyproject.toml needs, with the extras given: the image installs it before the sources are copied."""

import sys
import tomllib
from pathlib import Path

project = tomllib.loads(Path(sys.argv[1]).read_text())["project"]
extras = project["optional-dependencies"]
print("\n".join([*project["dependencies"], *(line for extra in sys.argv[2:] for line in extras[extra])]))
