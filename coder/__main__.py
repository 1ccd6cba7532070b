"""`python -m coder` and the console script `coder`."""

import sys


def main() -> int:
    """Start the command line, without the current folder on the path: it may hold another rich.py.

    Until the path is clean, only modules are imported that Python has loaded at its start. Under
    plain `python -m coder` this comes too late for a folder `coder` in the current one: Python
    imports that folder instead of this package. The console script and `python -P -m coder` do not.
    """
    try:
        import os

        try:
            here = {os.getcwd(), os.path.realpath(os.curdir)}
        except OSError:  # the folder was removed: cli/main.py reports it, if it is needed
            here = set()
        sys.path[:] = [path for path in sys.path if os.path.isabs(path) and path not in here]
        import gc
        import signal

        gc.disable()  # until the start is over (`collect_garbage`): imports leave no garbage

        # An exception in the middle of an import would be lost, or its lock kept
        if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
            signal.signal(signal.SIGINT, lambda number, frame: os._exit(130))
        from coder.cli.main import main as command_line

        code = command_line()
        leave(code)
    except KeyboardInterrupt:
        code = 130
    return code  # only after an interrupt: `leave` has ended the process otherwise


def leave(code: int) -> None:
    """End the process without taking the interpreter apart, which takes long."""
    import atexit
    import os

    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


if __name__ == "__main__":
    sys.exit(main())
