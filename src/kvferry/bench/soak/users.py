"""Threads that talk to the replicas, and some that have every answer judged."""

import queue
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from kvferry.bench.soak.asking import Answer, Question
from kvferry.bench.soak.judging import Exchange, Finding, Judge
from kvferry.bench.soak.traffic import Conversation, Traffic
from kvferry.errors import KvferryError

JUDGES = 3
MAX_UNJUDGED = 24  # then users wait: the judge's engine computes everything itself
AWAY_S = 0.1  # before a replica that is down is asked again
MAX_PROBLEMS = 50
JOIN_S = 300.0
_POLL_S = 0.2


@dataclass(slots=True)
class Tally:
    """requests: by how they ended. findings: of the judge. Thread-safe where methods are used."""

    requests: Counter[str] = field(default_factory=Counter[str])
    tokens: int = 0
    cached_tokens: int = 0
    prompt_tokens: int = 0
    findings: Counter[Finding] = field(default_factory=Counter[Finding])
    problems: list[str] = field(default_factory=list[str])
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def ended(self, how: str, question: Question | None = None, answer: Answer | None = None) -> None:
        """One request."""
        with self._lock:
            self.requests[how] += 1
            if question is not None and answer is not None:
                self.tokens += len(answer.tokens)
                if answer.whole:
                    self.prompt_tokens += len(question.prompt)
                    self.cached_tokens += answer.cached

    def judged(self, finding: Finding) -> None:
        """One answer."""
        with self._lock:
            self.findings[finding] += 1

    def problem(self, text: str) -> None:
        """Something that must not be."""
        with self._lock:
            if len(self.problems) < MAX_PROBLEMS:
                self.problems.append(text)


class Users:
    """Start them, stop them; then every answer has been judged."""

    def __init__(
        self,
        traffics: list[Traffic],
        *,
        ask: Callable[[str, Question], Answer | None],
        replicas: tuple[str, ...],
        judge: Judge,
        tally: Tally,
    ) -> None:
        """ask: a question at a replica; None when that went away, with our knowledge."""
        self._ask = ask
        self._replicas = replicas
        self._judge = judge
        self._tally = tally
        self._unjudged: queue.Queue[Exchange] = queue.Queue(MAX_UNJUDGED)
        self._stopping = threading.Event()
        self._all_asked = threading.Event()
        self._threads = [
            threading.Thread(target=self._talk, args=(traffic,), name=f"soak-user-{number}", daemon=True)
            for number, traffic in enumerate(traffics)
        ]
        self._judging = [
            threading.Thread(target=self._judge_all, name=f"soak-judge-{number}", daemon=True)
            for number in range(JUDGES)
        ]

    def start(self) -> None:
        """All at once."""
        for thread in (*self._threads, *self._judging):
            thread.start()

    def stop(self) -> None:
        """After what they ask now. What hangs is a problem."""
        self._stopping.set()
        give_up = time.monotonic() + JOIN_S
        for thread in self._threads:
            thread.join(max(0.0, give_up - time.monotonic()))
        self._all_asked.set()
        for thread in self._judging:
            thread.join(max(1.0, give_up - time.monotonic()))
        for thread in (*self._threads, *self._judging):
            if thread.is_alive():
                self._tally.problem(f"{thread.name} still waits {JOIN_S:.0f} s after the end")

    def _talk(self, traffic: Traffic) -> None:
        conversation = traffic.begins()
        while not self._stopping.is_set():
            said = traffic.says(conversation)
            if said is None:
                conversation = traffic.begins()
                continue
            prompt, tokens = said
            question = Question(
                prompt, tokens, stop_after=traffic.gives_up_after(tokens), priority=traffic.priority()
            )
            replica = self._replicas[traffic.chooses(len(self._replicas))]
            try:
                answer = self._ask(replica, question)
            except KvferryError as error:
                self._tally.ended("failed")
                self._tally.problem(f"{len(prompt)} tokens: {error}")
                self._stopping.wait(AWAY_S)
                continue
            self._answered(conversation, Exchange(replica, question, answer) if answer is not None else None)

    def _answered(self, conversation: Conversation, exchange: Exchange | None) -> None:
        if exchange is None:
            self._tally.ended("without their engine")
            self._stopping.wait(AWAY_S)
            return
        answer = exchange.answer
        self._tally.ended("answered" if answer.whole else "given up", exchange.question, answer)
        if answer.whole:
            conversation.history += answer.tokens
        self._unjudged.put(exchange)

    def _judge_all(self) -> None:
        while True:
            try:
                exchange = self._unjudged.get(timeout=_POLL_S)
            except queue.Empty:
                if self._all_asked.is_set():
                    return
                continue
            try:
                finding = self._judge(exchange)
            except KvferryError as error:
                self._tally.problem(f"not judged: {error}")
                continue
            self._tally.judged(finding)
            if finding is Finding.WRONG:
                self._tally.problem(_wrong(exchange))


def _wrong(exchange: Exchange) -> str:
    question, answer = exchange.question, exchange.answer
    return (
        f"WRONG: replica {exchange.replica}, {len(question.prompt)} tokens, {answer.cached} of them cached, "
        f"answered {answer.tokens}"
    )
