"""The `queen` command."""


def main() -> None:
    """Run the `queen` command with the arguments of this process."""
    # Imported here because worker processes import this package too, and need none of the command line.
    from queen.cli.app import run

    run()
