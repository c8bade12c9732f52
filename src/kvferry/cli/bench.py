"""``kvferry bench tiers|engines``: hands over to the benchmark that was asked for."""

import argparse
import importlib

BENCHMARKS = {
    "tiers": ("kvferry.bench.tiers", "Valkey to pool and back, against bare sockets and the usual clients"),
    "engines": ("kvferry.bench.engines", "time to first token from each tier, against the engine's own hit"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """One sub-command per benchmark, each with arguments of its own."""
    benchmarks = parser.add_subparsers(dest="benchmark", required=True, metavar="BENCHMARK")
    for name, (module, line) in BENCHMARKS.items():
        sub = benchmarks.add_parser(name, help=line, description=line[0].upper() + line[1:] + ".")
        importlib.import_module(module).add_arguments(sub)


def main(args: argparse.Namespace) -> int:
    """Run it."""
    module, _ = BENCHMARKS[args.benchmark]
    code: int = importlib.import_module(module).main(args)
    return code
