"""What proves a tier, a connector or a client right, and breaks what they stand on: docs/testing.md.

tier_contract, connector_contract    suites to subclass; tier_calls, expectations: what they are written in
memory_tier, memory_connector        the smallest subjects that pass them
fake_engine, engine_books            an engine that keeps vLLM's books and checks every byte
random_life                          such engines over one node, with faults at any time
proxy, faults, relay                 TCP that delays, cuts, corrupts, inserts and falls silent
processes, servers                   programs, nodes and Valkey servers that are stopped, killed and restarted
worker, worker_fleet                 a mock vLLM server for routers, in this process or in one of its own
leaks, census, holdings              a pytest plugin; threads, descriptors, children; leases, pins, slots

Shipped, and never imported by the rest of kvferry but its benchmarks. Needs pytest and numpy.
"""
