"""`python -m coder` and the console script `coder`."""

import sys


def main() -> int:
    """Start the command line, with the folder we stand in off the path, where a stranger's rich.py might wait.

    Nothing is imported before this but what Python has loaded by then. Under plain `python -m coder` a folder `coder` in the
    one that we stand in is taken for us, before we can do anything: the console script and `python -P -m coder` see none.
    """
    try:
        import os

        try:
            here = {os.getcwd(), os.path.realpath(os.curdir)}
        except OSError:  # it is removed: main.py says so where it is needed
            here = set()
        sys.path[:] = [place for place in sys.path if os.path.isabs(place) and place not in here]
        import gc
        import signal

        gc.disable()  # until the application stands (`collect_garbage`): imports leave nothing to collect

        # An exception in the middle of an import would be lost, or its lock kept
        if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
            signal.signal(signal.SIGINT, lambda number, frame: os._exit(130))
        from coder.cli.main import main as run

        code = run()
        leave(code)
    except KeyboardInterrupt:
        code = 130
    return code


def leave(code: int) -> None:
    """End the process without taking the interpreter apart, which takes longer than many a start."""
    import atexit
    import os

    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


if __name__ == "__main__":
    sys.exit(main())
