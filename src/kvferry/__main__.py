"""``python -m kvferry`` is the ``kvferry`` command, and so is the installed script."""

import signal

# Ctrl-C in the middle of an import would be a traceback of that import. ``kvferry.cli.main`` takes over.
if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)

from kvferry.cli.main import run

if __name__ == "__main__":
    run()
