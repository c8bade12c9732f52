"""The demo's story, step by step, on a running fleet. Each step yields its figures and its proofs."""

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from kvferry.demo.ask import Question, Replica, Reply
from kvferry.demo.depth import Depth
from kvferry.demo.engineview import block_tokens_of
from kvferry.demo.fleet import Fleet
from kvferry.demo.outages import Outages
from kvferry.demo.prompts import PromptSet, chat, document, prompt_set
from kvferry.demo.steps import NO_STORY, Source, Step, Story, source_of, story_of
from kvferry.demo.verify import AnswerCheck, block_digests, check_answer, check_blocks, forget_everything
from kvferry.errors import KvferryError

TARGET_TOKENS = 6000
MAX_TOKENS = 16
WARM_UP_SEED = 1
REFERENCES = range(2, 10)  # questions of the steps that load
OWN_HIT = "an own hit"
COLD = "the cold answer"


@dataclass(slots=True)
class Facts:
    """What earlier steps established and later ones compare with.

    own_hits: by question, replica A's answers from its own cache. computed: digests of the KV blocks
    that A computed for the shared prefix. recompute_limit_s: the longest a recompute may take.
    """

    cold: Reply
    computed: frozenset[str]
    own_hits: dict[int, Reply] = field(default_factory=dict[int, Reply])


class Scenario:
    """Runs the steps in order; a generator, so that each can be shown when it is done."""

    def __init__(self, fleet: Fleet, *, say: Callable[[str], None]) -> None:
        self.fleet = fleet
        self.say = say
        self.block_tokens = 0
        self.prompts: PromptSet = PromptSet((), 0, 0)
        self._facts: Facts | None = None
        self._asked = 0
        self.story_id = ""

    # -- the story ---------------------------------------------------------------------------------

    def run(self) -> Iterator[Step]:
        """Every step. Raises KvferryError when one cannot be carried out at all."""
        first = self.replica("A")
        self.block_tokens = block_tokens_of(first.metrics())
        self.prompts = prompt_set(
            first.tokenize_chat,
            target_tokens=TARGET_TOKENS,
            block_tokens=self.block_tokens,
            max_tokens=MAX_TOKENS,
        )
        self.say(
            f"prompts: {len(self.prompts.prompts)} questions on one document, "
            f"{self.prompts.shared} shared tokens, {self.prompts.boundary} of them in whole blocks"
        )
        for name in sorted(self.fleet.replicas):
            self.warm_up(name)
        yield self.cold()
        yield self.own_hit()
        yield from self.never_saw_it()
        depth = Depth(self)
        depth.drained()
        yield self.valkey_only("valkey", "B, memory tier dropped and own cache reset", question=3)
        yield from self.restarted()
        yield from Outages(self).run()
        yield from depth.run()

    def cold(self) -> Step:
        """A computes the prefix; afterwards it is saved in the background."""
        before = self.fleet.node_view.committed_parts()
        reply = self.ask("A", 0, "cold")
        self.establish(Facts(reply, block_digests(self.replica("A"))))
        took = self.wait_saved(more_than=before)
        return self.step(
            "cold",
            "A, cold",
            "A",
            reply,
            allowed=(Source.COMPUTED,),
            wanted=0,
            note=f"stored in memory and Valkey {took:.1f} s after its answer",
        )

    def own_hit(self) -> Step:
        """A again; also gathers A's own-hit answers, which every loaded answer must equal."""
        reply = self.ask("A", 1, "own")
        self.facts.own_hits[1] = reply
        for number in REFERENCES:
            self.facts.own_hits[number] = self.ask("A", number, "reference")
        return self.step(
            "own", "A again, another question", "A", reply, allowed=(Source.OWN,), wanted=self.boundary
        )

    def never_saw_it(self) -> Iterator[Step]:
        """Every other replica takes the prefix out of the host's shared memory."""
        for name in [name for name in sorted(self.fleet.replicas) if name != "A"]:
            reply = self.ask(name, 2, "memory")
            yield self.step(
                "memory" if name == "B" else f"memory-{name}",
                f"{name}, which never saw it",
                name,
                reply,
                allowed=(Source.MEMORY,),
                wanted=self.boundary,
                loaded=True,
                answer=self.like_own_hit(reply, 2),
            )

    def valkey_only(self, key: str, title: str, *, question: int) -> Step:
        """Only Valkey has the prefix: host memory dropped, B's cache reset and its memory zeroed."""
        self.fleet.node_view.wait_written_back()
        self.fleet.node_view.drop_memory()
        forget_everything(self.replica("B"))
        reply = self.ask("B", question, key)
        return self.step(
            key,
            title,
            "B",
            reply,
            allowed=(Source.VALKEY,),
            wanted=self.boundary,
            loaded=True,
            answer=self.like_own_hit(reply, question),
        )

    def restarted(self) -> Iterator[Step]:
        """A is restarted and starts warm. Meanwhile B computes the prefix itself, for another tenant."""
        self.fleet.stop_replica("A")
        starting = self.fleet.launch_replicas(["A"])
        yield self.other_tenant()
        self.fleet.await_replicas(starting)
        self.warm_up("A")
        reply = self.ask("A", 4, "restart")
        yield self.step(
            "restart",
            "A, restarted",
            "A",
            reply,
            allowed=(Source.MEMORY, Source.VALKEY, Source.MIXED),
            wanted=self.boundary,
            loaded=True,
            answer=self.like_own_hit(reply, 4),
        )

    def warm_up(self, name: str) -> None:
        """One unrelated question: an engine's very first one also pays for setting its kernels up.

        Then all KV memory is zeros again: whatever blocks two replicas share later is the prefix.
        """
        prompt = self.replica(name).tokenize_chat(
            chat(document(4, filler=0, seed=WARM_UP_SEED), "Who piloted?")
        )
        self.replica(name).ask(Question(f"demo{os.getpid()}warm{name}", prompt, 2))
        forget_everything(self.replica(name))

    def other_tenant(self) -> Step:
        """The same tokens under another cache_salt: no reuse across the salt, and the same bytes."""
        forget_everything(self.replica("B"))
        reply = self.ask("B", 0, "salted", salt="another-tenant")
        return self.step(
            "salted",
            "B, the same prompt under another cache_salt",
            "B",
            reply,
            allowed=(Source.COMPUTED,),
            wanted=0,
            computed_like=self.facts.computed,
            answer=check_answer(reply, self.facts.cold, against=COLD),
            note="computed by B itself, while A restarts: its bytes against A's",
        )

    # -- what steps are made of --------------------------------------------------------------------

    @property
    def facts(self) -> Facts:
        """Raises KvferryError before the cold step."""
        if self._facts is None:
            raise KvferryError("the cold step comes first")
        return self._facts

    def establish(self, facts: Facts) -> None:
        """From here on, steps are compared with these."""
        self._facts = facts

    @property
    def boundary(self) -> int:
        """Tokens that a perfect cache reuses."""
        return self.prompts.boundary

    def replica(self, name: str) -> Replica:
        """A running replica."""
        return self.fleet.replicas[name]

    def question(self, number: int, tag: str, *, salt: str = "") -> Question:
        """One of the questions under an id of its own."""
        self._asked += 1
        self.story_id = request_id = f"demo{os.getpid()}x{self._asked:03d}x{tag}"
        return Question(request_id, self.prompts.prompts[number], MAX_TOKENS, salt)

    def ask(self, name: str, number: int, tag: str, *, salt: str = "") -> Reply:
        """Ask a replica one of the questions."""
        return self.replica(name).ask(self.question(number, tag, salt=salt))

    def story(self, reply: Reply) -> Story:
        """What the node knows of a request; nothing when the node is away."""
        try:
            return story_of(self.fleet.node_view.settled_records(reply.request_id))
        except KvferryError:
            return NO_STORY

    def like_own_hit(self, reply: Reply, question: int) -> AnswerCheck:
        """The answer against the own hit's at the same boundary."""
        return check_answer(reply, self.facts.own_hits[question], against=OWN_HIT)

    def step(
        self,
        key: str,
        title: str,
        replica: str,
        reply: Reply,
        *,
        allowed: tuple[Source, ...],
        wanted: int | None = None,
        loaded: bool = False,
        computed_like: frozenset[str] = frozenset(),
        limit_s: float | None = None,
        answer: AnswerCheck | None = None,
        note: str = "",
    ) -> Step:
        """Put a step together. loaded: compare the reused blocks' bytes with those A computed.

        computed_like: digests all of which this replica's own computing must have led to as well.
        """
        story = self.story(reply)
        blocks = None
        if loaded or computed_like:
            digests = block_digests(self.replica(replica))
            expected = len(computed_like) or reply.cached_tokens // self.block_tokens
            blocks = check_blocks(digests, self.facts.computed, wanted=expected)
        return Step(
            key=key,
            title=title,
            replica=replica,
            reply=reply,
            source=source_of(reply, story),
            allowed=allowed,
            reused_tokens=reply.cached_tokens,
            loaded_bytes=sum(story.nbytes.values()) if reply.cached_tokens else 0,
            reason=story.reason,
            load_s=story.load_s,
            limit_s=limit_s,
            wanted_tokens=wanted,
            blocks=blocks,
            answer=answer,
            note=note,
        )

    def wait_saved(self, *, more_than: int) -> float:
        """Until the shared prefix is published and written back; returns the seconds it took."""
        begun = time.monotonic()
        self.fleet.node_view.wait_saved(parts=more_than + self.boundary // self.chunk_tokens())
        return time.monotonic() - begun

    def chunk_tokens(self) -> int:
        """Tokens per stored chunk, as the node was told by the engine."""
        story = self.story(self.facts.cold)
        return story.chunk_tokens or self.block_tokens


def model_label(model: Path) -> str:
    """The model's name for people: the directory's, without the conversion's tag."""
    return model.name.rsplit("-", 1)[0] if model.parent.name == "models" else model.name
