"""Writes docs/guide/requests.jsonl.gz: an hour of two made-up assistants, as an OpenAI-like API logs it.

`shop` keeps its instructions as they are; `desk` puts the time of day in front of its own, which breaks
every prefix. The same numbers come out every time.
"""

import datetime as dt
import gzip
import io
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

OUT = Path(__file__).parents[1] / "docs" / "guide" / "requests.jsonl.gz"
START = dt.datetime(2026, 11, 30, 9, tzinfo=dt.UTC)
HOUR_S = 3600.0
CONVERSATIONS = 150
RULES = [
    f"Rule {number}: {rule}."
    for number, rule in enumerate(
        (
            "answer in the language of the question",
            "never promise a date that the order does not show",
            "ask for the order number before you look anything up",
            "refunds over 200 go to a person",
            "quote the terms by their paragraph",
            "offer a replacement before a refund",
            "say what you did and what happens next",
            "do not repeat what the customer wrote",
        )
        * 8,
        1,
    )
]
TOOLS = [
    {"type": "function", "function": {"name": name, "description": text, "parameters": {
        "type": "object", "properties": {"order": {"type": "string", "description": "like A-10234"}}}}}
    for name, text in (
        ("order_status", "Where an order is, and when it will arrive."),
        ("refund", "Pays an order back, in whole or in part."),
        ("address", "Changes where an order goes, while it has not left."),
    )
]  # fmt: skip
SAYINGS = (
    "I looked at the order and its parcel left our house on the day after you placed it",
    "the carrier names the depot where it was last seen and says that it goes on tomorrow",
    "paragraph 7 of our terms gives you thirty days from the day it arrives",
    "I have noted the new address and you will have a message once the label is printed",
    "if it is not there by Friday, write again and we send another one at once",
    "the amount goes back the way it was paid and takes three to five days",
)
ASKED = (
    "Where is my order",
    "It came in the wrong colour, can I swap it",
    "The box was open when it arrived",
    "Please send it to my office instead",
    "I was charged twice for this",
)


def instructions(assistant: str, at_s: float) -> str:
    """The system prompt at that time."""
    clock = (START + dt.timedelta(seconds=at_s)).strftime("%Y-%m-%d %H:%M")
    first = f"The time is {clock}. " if assistant == "desk" else ""
    return f"{first}You are the assistant of the {assistant}. " + " ".join(RULES)


def conversation(chance: random.Random, number: int) -> Iterator[dict[str, Any]]:
    """The requests of one, each with all that was said before."""
    assistant = "desk" if number % 10 == 9 else "shop"
    at_s = chance.uniform(0, HOUR_S)
    said: list[dict[str, str]] = []
    for _ in range(1 + min(14, int(chance.expovariate(0.15)))):
        question = (
            f"{chance.choice(ASKED)}? It is order {chr(65 + number % 26)}-{chance.randrange(10_000, 99_999)}."
        )
        said.append({"role": "user", "content": question})
        messages = [{"role": "system", "content": instructions(assistant, at_s)}, *said]
        size = len(json.dumps([TOOLS, messages]))
        answer = ". ".join(chance.choices(SAYINGS, k=chance.randint(6, 24))).capitalize() + "."
        if at_s < HOUR_S:
            yield {
                "timestamp": (START + dt.timedelta(seconds=round(at_s, 3))).isoformat(),
                "session_id": f"c{number}",
                "request": {"model": assistant, "messages": messages, "tools": TOOLS},
                "response": {
                    "usage": {"prompt_tokens": round(size / 4.2), "completion_tokens": len(answer) // 4}
                },
            }
        said.append({"role": "assistant", "content": answer})
        at_s += 20 + chance.expovariate(1 / 200)


def log() -> bytes:
    """All lines in the order of their times, packed."""
    chance = random.Random(20261130)
    lines = [line for number in range(CONVERSATIONS) for line in conversation(chance, number)]
    packed = io.BytesIO()
    with gzip.GzipFile(fileobj=packed, mode="wb", mtime=0, filename="") as stream:
        for line in sorted(lines, key=lambda line: str(line["timestamp"])):
            stream.write(json.dumps(line, separators=(",", ":")).encode() + b"\n")
    return packed.getvalue()


if __name__ == "__main__":
    OUT.write_bytes(log())
    print(f"wrote {OUT} ({OUT.stat().st_size:,} bytes)")
