"""The `queen` command."""

import sys


def main() -> None:
    """Run the `queen` command with the arguments of this process."""
    # Imported here because worker processes import this package too, and need none of the command line.
    try:
        if sys.argv[1:2] == ["serve"]:
            _serve(sys.argv[2:])
        from queen.cli.app import run
    except ModuleNotFoundError as error:
        # The client alone brings the command, too, but not what it stands on.
        raise SystemExit(f"queen: {error}; the server is installed by: pip install '.[server]' in a clone") from error

    run()


def _serve(arguments: list[str]) -> None:
    """Serve and exit, unless the arguments have to be parsed: a supervisor without that takes half the memory."""
    from queen.cli.common.exits import report
    from queen.cli.serve.start import plain_options, start

    if (options := plain_options(arguments)) is not None:
        try:
            start(**options)
        except Exception as error:
            sys.exit(report(error))
        sys.exit()
