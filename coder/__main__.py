"""`python -m coder` and the console script `coder`."""

import sys


def main() -> int:
    """Start the command line, with the folder we stand in off the path, where a stranger's rich.py might wait.

    What Python itself imports before this line under plain `python -m coder` is out of our hands: README.md says how to
    start in a folder that one does not trust.
    """
    import os

    sys.path[:] = [place for place in sys.path if place not in ("", os.getcwd())]
    try:
        from coder.terminal.cli import main as run

        return run()
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
