"""``python -m kvferry`` is the ``kvferry`` command."""

from kvferry.cli.main import run

if __name__ == "__main__":
    run()
