"""``kvferry bench NAME``: hands over to the benchmark that was asked for."""

import argparse
import importlib

from kvferry.cli.parser import Parser

BENCHMARKS = {
    "tiers": ("kvferry.bench.tiers", "Valkey to pool and back, against bare sockets and the usual clients"),
    "engines": ("kvferry.bench.engines", "time to first token from each tier, against the engine's own hit"),
    "lmcache": ("kvferry.bench.lmcache", "LMCache's own bench l2: our adapter beside its resp and valkey"),
    "valkey-eviction": (
        "kvferry.bench.valkey_eviction.command",
        "what a full Valkey keeps of a trace, by its policy and by what steers that",
    ),
    "policies": ("kvferry.bench.policies.command", "hit rates of the pool's eviction policy and of others"),
    "router": (
        "kvferry.bench.router.command",
        "what the router adds and costs, and what its choice is worth, beside vllm-router",
    ),
    "faults": ("kvferry.bench.faults.command", "what a fault costs real engines, and how reuse returns"),
    "chaos": ("kvferry.bench.chaos.command", "wrong bytes, leaks and late answers while all of it is broken"),
    "soak": (
        "kvferry.bench.soak.command",
        "conversations on real engines: every answer and loaded block checked",
    ),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The name of a benchmark; what follows is the benchmark's own."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = "\n".join(f"{name:<15} {line}" for name, (_, line) in BENCHMARKS.items())
    parser.add_argument("benchmark", choices=sorted(BENCHMARKS), help="see below")
    parser.add_argument("rest", nargs=argparse.REMAINDER, metavar="...", help="its arguments, or --help")


def main(args: argparse.Namespace) -> int:
    """Import that benchmark, parse its arguments and run it."""
    module, line = BENCHMARKS[args.benchmark]
    benchmark = importlib.import_module(module)
    parser = Parser(prog=f"kvferry bench {args.benchmark}", description=line, allow_abbrev=False)
    benchmark.add_arguments(parser)
    code: int = benchmark.main(parser.parse_args(args.rest))
    return code
