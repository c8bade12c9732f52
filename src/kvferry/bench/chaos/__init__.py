"""Byte-verifying engines, real nodes and a real Valkey Cluster, while all of it is broken on purpose."""
