"""Advice from numbers alone: what a shared cache is worth, and when it is not worth it."""
