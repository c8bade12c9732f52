"""``kvferry VERB``: finds the verb, and turns every expected error into one line and an exit code.

Exit codes: 0 done, 1 it did not work (no node, a failed check), 2 bad input or refused, 130 interrupted.
A verb is a module with ``add_arguments(parser)`` and ``main(args) -> int``, imported only when asked for.
"""

import argparse
import contextlib
import errno
import importlib
import logging
import os
import signal
import sys
from collections.abc import Sequence
from typing import NoReturn, Protocol, cast

from kvferry import __version__
from kvferry.cli.parser import Parser
from kvferry.errors import KvferryError, MisconfiguredError, RefusedError

EXIT_FAILED = 1
EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 130
MAX_LINE = 1000
# What a write to standard output can end in that is nobody's defect.
OUTPUT_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EFBIG)

# verb -> (module, one line of help)
VERBS = {
    "node": ("kvferry.cli.node", "run this host's node: shared memory pool, Valkey behind it"),
    "keeper": ("kvferry.cli.keeper", "run a keeper: NVMe and a bucket behind Valkey"),
    "router": ("kvferry.cli.router", "one address for many engines: each request goes where its prefix is"),
    "flags": ("kvferry.cli.flags", "print what adds kvferry to an engine, or its user to Valkey"),
    "status": ("kvferry.cli.status", "what the node of this host holds and does"),
    "explain": ("kvferry.cli.explain", "why a request hit or missed"),
    "size": ("kvferry.cli.size", "KV bytes of a model per token and per request, from its config"),
    "concurrency": ("kvferry.cli.concurrency", "how many requests GPUs hold at once, and what limits them"),
    "plan": ("kvferry.cli.plan", "what to set for a workload, and what to expect"),
    "price": ("kvferry.cli.price", "what a shared cache earns and costs a month"),
    "drop": ("kvferry.cli.drop", "forget what a tier holds"),
    "warm": ("kvferry.cli.warm", "bring prefixes up before they are asked for"),
    "analyze": ("kvferry.cli.analyze", "what a trace or request log could reuse, and at which capacity"),
    "demo": ("kvferry.demo.main", "a whole fleet on this machine, proving reuse with a real engine"),
    "bench": ("kvferry.cli.bench", "measure tiers or engines on this machine"),
}
EPILOG = """\
Start with `kvferry node --pool 16GiB --valkey valkey://host:6379` on each inference host, then paste what
`kvferry flags vllm` prints into `vllm serve`. `kvferry VERB --help` tells more, docs/settings.md too."""


class Verb(Protocol):
    """What the module of a verb offers."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare the verb's arguments."""

    def main(self, args: argparse.Namespace) -> int:
        """Do it; the result is the exit code."""
        ...


def _overview() -> Parser:
    parser = Parser(
        prog="kvferry",
        description="A computed prompt prefix as a fleet-wide asset.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="kvferry VERB [options]",
        add_help=False,  # ``_dispatch`` sees to it, and every line counts
    )
    parser.add_argument(
        "--version", action="version", version=f"kvferry {__version__}", help=argparse.SUPPRESS
    )
    verbs = parser.add_argument_group("verbs")
    for name, (_, line) in VERBS.items():
        verbs.add_argument(f"{name:<11}", nargs="?", help=line, metavar=f"{name:<11}")
    return parser


def _dispatch(argv: Sequence[str]) -> int:
    if not argv or argv[0] in ("-h", "--help", "help"):
        _overview().print_help()
        return 0 if argv else EXIT_BAD_INPUT
    if argv[0].startswith("-"):
        _overview().parse_args([argv[0]])
        return 0
    name = argv[0]
    if name not in VERBS:
        from kvferry.sources import suggestion

        raise MisconfiguredError(f"unknown verb {name!r}; {suggestion(name, VERBS)}")
    module, line = VERBS[name]
    verb = cast(Verb, importlib.import_module(module))
    parser = Parser(prog=f"kvferry {name}", description=line[0].upper() + line[1:] + ".", allow_abbrev=False)
    verb.add_arguments(parser)
    arguments = parser.parse_args(argv[1:])
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:  # imports are over: see ``__main__``
        signal.signal(signal.SIGINT, signal.default_int_handler)
    code = verb.main(arguments)
    if sys.stdout is not None:  # Python's own flush at exit would complain in its own words
        sys.stdout.flush()
    return code


def main(argv: Sequence[str]) -> int:
    """Run one command line (without the program's name); the result is the exit code."""
    logging.basicConfig(
        stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname).1s %(message)s"
    )
    try:
        return _dispatch(argv)
    except (MisconfiguredError, RefusedError) as error:
        return _complain(error, EXIT_BAD_INPUT)
    except KvferryError as error:
        return _complain(error, EXIT_FAILED)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        _drop_output()  # the reader (head, less) is gone
        return EXIT_FAILED
    except OSError as error:
        if error.errno not in OUTPUT_ERRORS:
            raise
        _drop_output()
        return _complain(KvferryError(f"cannot write: {error.strerror}; make room for it"), EXIT_FAILED)


def _drop_output() -> None:
    """Python would complain again when it flushes at exit."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _complain(error: KvferryError, code: int) -> int:
    """One line that a terminal shows as it is, whatever the value in it was."""
    line = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in " ".join(str(error).split()))
    if len(line) > MAX_LINE:
        line = f"{line[: MAX_LINE // 2]} ... {line[-MAX_LINE // 2 :]}"
    print(f"kvferry: {line}", file=sys.stderr)
    return code


def _fill_standard_files() -> None:
    """Open /dev/null where a standard descriptor is closed: else the next socket would take its number,
    and what is printed would go there."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest free number, which is this one
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  (for the life of the process)
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115


def run() -> NoReturn:
    """Entry point of the ``kvferry`` script."""
    _fill_standard_files()
    sys.exit(main(sys.argv[1:]))
