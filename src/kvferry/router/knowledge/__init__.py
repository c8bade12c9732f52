"""What the router knows of prefixes: who holds what, learned from nodes, answers and what it sent. Pure."""

from kvferry.router.knowledge.knowledge import Knowledge, Sight
from kvferry.router.knowledge.sight import Held

__all__ = ["Held", "Knowledge", "Sight"]
