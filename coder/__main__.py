"""`python -m coder` and the console script `coder`."""

import sys


def main() -> int:
    """Start the command line; nothing of the folder we stand in can be imported by it."""
    try:
        from coder.terminal.cli import main as run

        return run()
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    # `python -m` puts the folder we stand in first on the path: a rich.py in a stranger's repository would be imported
    # and see the key. The package itself is loaded already.
    import os

    sys.path[:] = [place for place in sys.path if place not in ("", os.getcwd())]
    sys.exit(main())
