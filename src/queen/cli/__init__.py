"""The `queen` command."""


def main() -> None:
    """Run the `queen` command with the arguments of this process."""
    # Imported here because worker processes import this package too, and need none of the command line.
    try:
        from queen.cli.app import run
    except ModuleNotFoundError as error:
        # The client alone brings the command, too, but not what it stands on.
        raise SystemExit(f"queen: {error}; the server is installed by: pip install '.[server]' in a clone") from error

    run()
