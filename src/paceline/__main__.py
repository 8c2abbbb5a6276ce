"""`python -m paceline` is `paceline`."""

import sys

from paceline.errors import EXIT_INTERRUPTED


def main() -> None:
    """Run the command line; Ctrl-C while that is imported, which takes most of a short command, ends it as quietly."""
    try:
        from paceline.cli import main as run_command_line

        run_command_line()
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)


if __name__ == "__main__":
    main()
