"""`python -m queen.cli`, as the `queen` command."""

from queen.cli import main

main()
