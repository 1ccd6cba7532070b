"""`python -m coder` and the console script `coder`."""

import sys


def main() -> int:
    """Start the command line, with the folder we stand in off the path, where a stranger's rich.py might wait.

    Nothing is imported before this but what Python has loaded by then. Under plain `python -m coder` a folder `coder` in the
    one that we stand in is taken for us, before we can do anything: the console script and `python -P -m coder` see none.
    """
    import os

    here = {"", os.getcwd(), os.path.realpath(os.curdir)}
    sys.path[:] = [place for place in sys.path if os.path.isabs(place) and place not in here]
    try:
        from coder.terminal.cli import main as run

        return run()
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
