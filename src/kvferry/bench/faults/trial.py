"""One trial: a prompt in Valkey alone, a fault, a request, what later requests lose, the way back."""

import math
import time
from dataclasses import asdict, dataclass, field
from typing import Any

from kvferry.bench.faults.kinds import Kind, Moment
from kvferry.bench.faults.stage import LOAD_S, WITHIN_S, Stage
from kvferry.bench.prompts import Prompts
from kvferry.demo.ask import Asking, Question, Replica, Reply
from kvferry.demo.engineview import counter_of
from kvferry.demo.verify import block_digests, check_answer, check_blocks, forget_everything
from kvferry.errors import KvferryError, RetryError

MAX_TOKENS = 8
AFTER_TOKENS = 300
AFTER_REQUESTS = 3
TTFT_EXTRA_S = 0.5
MAX_LOST_S = 0.010
MAX_ROUNDING = 0.125  # of a log probability: one step of a bf16 logit between 16 and 32, where the best lie
TRIES = 4
POLL_S = 0.002
SEEN_SHARE = 0.2  # of a load's bytes have passed when it is broken


@dataclass(frozen=True, slots=True)
class Paid:
    """What a request paid, seconds, by the connector's own timers.

    lookup_lost_s, load_lost_s: waiting for an answer that brought nothing, and for loads that failed.
    lookup_s, load_s: for answers and loads that brought something. hooks: in the connector's methods.
    reasons: what failed, how often.
    """

    lookup_lost_s: float = 0.0
    load_lost_s: float = 0.0
    lookup_s: float = 0.0
    load_s: float = 0.0
    hooks: dict[str, float] = field(default_factory=dict[str, float])
    reasons: dict[str, int] = field(default_factory=dict[str, int])

    @property
    def lost_s(self) -> float:
        """What it would not have paid without the connector, and got nothing for."""
        return self.lookup_lost_s + self.load_lost_s + sum(self.hooks.values())

    @property
    def spent_s(self) -> float:
        """What it paid for tokens that it need not compute."""
        return self.lookup_s + self.load_s


@dataclass(slots=True)
class Trial:
    """cold_s: TTFT of the same prompt where nobody had it. deadline_s: the load's, by the node; 0 for none.

    itself: what the request paid. usual: short new requests before the fault, behind a long new one whose
    chunks are being stored. after: the same behind the request itself, while the part is still broken.
    back_s: from the mending to a request that reused everything. back_reasons: why those before did not.
    baseline_s: until the node held nothing.
    problems: a wrong answer, or a trial that did not try what it should.
    """

    fault: str
    moment: str
    cold_s: float = 0.0
    ttft_s: float = 0.0
    deadline_s: float = 0.0
    wanted_blocks: int = 0
    loaded_blocks: int = 0
    reasons: dict[str, int] = field(default_factory=dict[str, int])
    itself: Paid = field(default_factory=Paid)
    usual: list[Paid] = field(default_factory=list[Paid])
    after: list[Paid] = field(default_factory=list[Paid])
    back_s: float | None = None
    back_reasons: list[str] = field(default_factory=list[str])
    baseline_s: float | None = None
    problems: list[str] = field(default_factory=list[str])

    @property
    def bound_s(self) -> float:
        """The longest TTFT that keeps the promise."""
        return self.cold_s + self.deadline_s + TTFT_EXTRA_S

    def document(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self) | {
            "bound_s": self.bound_s,
            **{
                f"{when}_{what}_s": [getattr(paid, f"{what}_s") for paid in requests]
                for when, requests in (("usual", self.usual), ("after", self.after))
                for what in ("lost", "spent")
            },
        }


class Counted:
    """A replica's counters and the connector's times, and what was added to them since."""

    def __init__(self, stage: Stage, replica: Replica) -> None:
        self._stage = stage
        self._replica = replica
        self._before = replica.metrics()
        self._hooks_before = stage.hooks_s(replica)

    def __call__(self, name: str) -> float:
        """Of a counter of the connector."""
        full = f"vllm:kvferry_{name}"
        return counter_of(self._replica.metrics(), full) - counter_of(self._before, full)

    def reasons(self) -> dict[str, int]:
        """Failures by reason."""
        before, now = failures_of(self._before), failures_of(self._replica.metrics())
        return {reason: n - before.get(reason, 0) for reason, n in now.items() if n > before.get(reason, 0)}

    def paid(self) -> Paid:
        """By all requests since."""
        lookup_lost_s, load_lost_s = self("lookup_lost_seconds"), self("load_lost_seconds")
        hooks = self._stage.hooks_s(self._replica).items()
        return Paid(
            lookup_lost_s=lookup_lost_s,
            load_lost_s=load_lost_s,
            lookup_s=self("lookup_seconds") - lookup_lost_s,
            load_s=self("load_seconds") - load_lost_s,
            hooks={name: s - self._hooks_before[name] for name, s in hooks if s > self._hooks_before[name]},
            reasons=self.reasons(),
        )


def failures_of(page: str) -> dict[str, int]:
    """Failures by reason, from an engine's Prometheus page."""
    found: dict[str, int] = {}
    for line in page.splitlines():
        if line.startswith("vllm:kvferry_failures_total{"):
            reason = line.partition('reason="')[2].partition('"')[0]
            found[reason] = found.get(reason, 0) + int(float(line.rpartition(" ")[2]))
    return found


def agree(reply: Reply, reference: Reply) -> bool:
    """Equal texts, or first tokens that are as likely: rounding may decide, and the rest follows."""
    return check_answer(reply, reference, against="").passed or first_gap(reply, reference) <= MAX_ROUNDING


def first_gap(reply: Reply, reference: Reply) -> float:
    """Between the first tokens' log probabilities; infinite where one has no token."""
    if not reply.logprobs or not reference.logprobs:
        return math.inf
    return abs(reply.logprobs[0] - reference.logprobs[0])


class Trials:
    """Carries trials out on a started stage. tokens: of a prompt, whole blocks and a tail."""

    def __init__(self, stage: Stage, prompts: Prompts, *, tokens: int, block_tokens: int) -> None:
        self._stage = stage
        self._prompts = prompts
        self._tokens = tokens
        self._block_tokens = block_tokens
        self._asked = 0

    def warm_up(self) -> None:
        """Run every kernel and touch all KV memory; the second prompt teaches the connector the prefill."""
        for replica in self._stage.fleet.replicas.values():
            forget_everything(replica)
            for _ in range(2):
                self._ask(replica, self._prompts.tokens(self._tokens))

    def run(self, kind: Kind, moment: Moment) -> Trial:
        """One trial. Whatever was broken is mended, or KvferryError says why it could not be."""
        for _ in range(TRIES):
            trial = self._try(kind, moment)
            if trial is not None:
                return trial
            self._stage.fleet.kill_node()  # it may think Valkey too slow to be worth a load
            self._stage.fleet.start_node()
        raise RetryError(f"{kind.name} {moment.value}: no load could be caught in {TRIES} tries")

    def _try(self, kind: Kind, moment: Moment) -> Trial | None:
        """None when no load was under way to be broken."""
        stage = self._stage
        trial = Trial(kind.name, moment.value, wanted_blocks=self._tokens // self._block_tokens)
        serving = stage.a if kind.own else stage.b
        self._ask(serving, self._prompts.tokens(self._tokens))
        self._short(trial.usual, serving)
        prompt, cold = self._stored(trial)
        broken, reply = self._broken(kind, moment, trial, prompt)
        if not broken:
            return None
        try:
            answered = reply or self._elsewhere(trial, prompt)
            self._short(trial.after, serving)
            self._check(trial, kind, answered, cold, prompt, whole=reply is None)
        finally:
            begun = time.monotonic()
            kind.mends(stage)
        self._back(trial, prompt, begun=time.monotonic() if kind.own else begun)
        rest_s = stage.at_rest()
        trial.baseline_s = rest_s if trial.baseline_s is None else trial.baseline_s
        return trial

    # -- the parts of it ---------------------------------------------------------------------------

    def _stored(self, trial: Trial) -> tuple[tuple[int, ...], Reply]:
        """A prompt that A has computed and that lies in Valkey alone, and A's answer."""
        stage, prompt = self._stage, self._prompts.tokens(self._tokens)
        stage.at_rest()
        before = stage.fleet.node_view.committed_parts()
        cold = self._ask(stage.a, prompt)
        trial.cold_s = cold.ttft_s
        stage.fleet.node_view.wait_saved(parts=before + trial.wanted_blocks)
        stage.at_rest()
        stage.fleet.node_view.drop_memory()
        forget_everything(stage.b)
        return prompt, cold

    def _broken(
        self, kind: Kind, moment: Moment, trial: Trial, prompt: tuple[int, ...]
    ) -> tuple[bool, Reply | None]:
        """Whether it broke when it should, and the answer, if one came."""
        stage = self._stage
        counted = Counted(stage, stage.b)
        question = self._question(prompt)
        if moment is Moment.BEFORE:
            kind.breaks(stage)
            reply = None if kind.own else stage.b.ask(question)
            broken = True
        else:
            asking = Asking(stage.b, question)
            broken = self._break_load(kind, trial, asking, question)
            reply = self._reply(asking, kind)
        stage.proxy.replies.rate_bytes_s = None
        if not (kind.own and broken):
            trial.itself = counted.paid()
            trial.loaded_blocks = int(counted("loaded_tokens")) // self._block_tokens
            trial.reasons = counted.reasons()
            if counted("misses"):
                trial.problems.append("a failure was counted as a miss")
        if not trial.deadline_s:
            trial.deadline_s = self._deadline_s(question)
        return broken, reply

    def _break_load(self, kind: Kind, trial: Trial, asking: Asking, question: Question) -> bool:
        stage, replies = self._stage, self._stage.proxy.replies
        nbytes = self._load_bytes()
        begun, replies.rate_bytes_s = replies.passed_bytes, nbytes / LOAD_S
        while replies.passed_bytes < begun + SEEN_SHARE * nbytes:
            if asking.done:
                return False
            time.sleep(POLL_S)
        trial.deadline_s = self._deadline_s(question)
        kind.breaks(stage)
        return True

    def _reply(self, asking: Asking, kind: Kind) -> Reply | None:
        try:
            return asking.reply()
        except RetryError:
            if kind.own:
                return None
            raise

    def _load_bytes(self) -> int:
        spaces = self._stage.fleet.node_view.status()
        stored = spaces["counters"]["committed_bytes"] / max(1, spaces["counters"]["committed_parts"])
        return int(stored * (self._tokens // self._block_tokens))

    def _deadline_s(self, question: Question) -> float:
        """What the node gave the load; 0 when it gave none, or cannot be asked."""
        try:
            records = self._stage.fleet.node_view.explain(question.request_id)
        except KvferryError:
            return 0.0
        return float(records[0].get("deadline_s") or 0.0) if records else 0.0

    def _elsewhere(self, trial: Trial, prompt: tuple[int, ...]) -> Reply:
        """The replica died, and the client asks the other one."""
        trial.baseline_s = self._stage.at_rest()
        trial.loaded_blocks = 0
        return self._ask(self._stage.a, prompt)

    def _check(
        self,
        trial: Trial,
        kind: Kind,
        reply: Reply,
        cold: Reply,
        prompt: tuple[int, ...],
        *,
        whole: bool,
    ) -> None:
        """The answer is that of an engine that has as much of the prompt itself; all of it if ``whole``."""
        stage = self._stage
        if whole:
            reference = self._reference(prompt, trial.wanted_blocks, cold)
        else:
            blocks = check_blocks(block_digests(stage.b), block_digests(stage.a), wanted=trial.loaded_blocks)
            if not blocks.passed:
                trial.problems.append(f"only {blocks.equal} of {blocks.wanted} loaded blocks are right")
            reference = self._reference(prompt, trial.loaded_blocks, cold)
        trial.ttft_s = reply.ttft_s
        # A computed the reference's blocks anew in another split, which may round differently.
        if not any(agree(reply, other) for other in (reference, cold)):
            trial.problems.append(
                "the answer is not the one of an engine at the same boundary: "
                f"{reply.text!r}, not {reference.text!r} (first token {first_gap(reply, reference):.3f} "
                f"apart) and not, as cold, {cold.text!r} ({first_gap(reply, cold):.3f} apart)"
            )
        if kind.harmless and trial.loaded_blocks < trial.wanted_blocks:
            trial.problems.append("the load did not go on")

    def _reference(self, prompt: tuple[int, ...], blocks: int, cold: Reply) -> Reply:
        """A's answer with so many blocks of its own."""
        if blocks == 0:
            return cold
        if blocks == len(prompt) // self._block_tokens:
            return self._ask(self._stage.a, prompt)
        salt = f"reference{time.monotonic_ns()}"
        self._ask(self._stage.a, prompt[: blocks * self._block_tokens + 1], salt=salt)
        return self._ask(self._stage.a, prompt, salt=salt)

    def _short(self, paid: list[Paid], replica: Replica) -> None:
        """New short prompts, one after the other; what each of them pays, without the stores of the last."""
        for _ in range(AFTER_REQUESTS):
            self._stage.wait_quiet(replica)
            counted = Counted(self._stage, replica)
            self._ask(replica, self._prompts.tokens(AFTER_TOKENS))
            paid.append(counted.paid())

    def _back(self, trial: Trial, prompt: tuple[int, ...], *, begun: float) -> None:
        """Until B reuses all of it again; A is asked too, since what was lost must be stored again."""
        stage = self._stage
        while True:
            forget_everything(stage.b)
            counted, asked = Counted(stage, stage.b), time.monotonic()
            reply = self._ask(stage.b, prompt)
            if reply.cached_tokens == trial.wanted_blocks * self._block_tokens:
                trial.back_s = asked - begun
                return
            trial.back_reasons.append(" ".join(counted.reasons()) or "found nothing")
            if time.monotonic() - begun > WITHIN_S:
                trial.problems.append(f"reuse did not return within {WITHIN_S:.0f} s")
                return
            self._ask(stage.a, prompt)

    def _ask(self, replica: Replica, prompt: tuple[int, ...], *, salt: str = "") -> Reply:
        return replica.ask(self._question(prompt, salt=salt))

    def _question(self, prompt: tuple[int, ...], *, salt: str = "") -> Question:
        self._asked += 1
        return Question(f"faults{self._asked}-{time.monotonic_ns()}", prompt, MAX_TOKENS, salt)
