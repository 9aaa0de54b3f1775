"""The actors of the stream: sources, mappers, reducers by key, a sink, and what they should count."""

from __future__ import annotations

import random
import time
import zlib
from collections import Counter, deque
from collections.abc import Iterator
from typing import Any, NamedTuple

import flowengine as flow

WORDS = tuple(f"word{number}" for number in range(2_000))
WEIGHTS = tuple(1.0 / rank for rank in range(1, len(WORDS) + 1))  # some words are frequent, as in any language
SENTENCE_WORDS, BATCH_SENTENCES = 100, 10
WINDOW = 16  # batches that a sender has under way to one receiver


class Part(NamedTuple):
    """Names a batch, and says when it was due and which mapper it went through."""

    source: int
    number: int
    mapper: int
    due_s: float


class Arrival(NamedTuple):
    """A part of a batch at the sink: which mapper it came through, when, and how long after it was due."""

    mapper: int
    at_s: float
    latency_s: float


def sentences(source: int, number: int) -> list[str]:
    """One batch: the same each time that it is asked for."""
    rng = random.Random(f"{source}/{number}")
    return [" ".join(rng.choices(WORDS, WEIGHTS, k=SENTENCE_WORDS)) for _ in range(BATCH_SENTENCES)]


def counted(batch: list[str]) -> Counter[str]:
    """How often each word is in a batch."""
    return Counter(word for sentence in batch for word in sentence.split())


def expected(sources: int, batches: int) -> Counter[str]:
    """All words of all batches."""
    total: Counter[str] = Counter()
    for source in range(sources):
        for number in range(batches):
            total += counted(sentences(source, number))
    return total


def split(words: Counter[str], parts: int) -> Iterator[dict[str, int]]:
    """The words by their key, one part for each reducer."""
    found: list[dict[str, int]] = [{} for _ in range(parts)]
    for word, count in words.items():
        found[zlib.crc32(word.encode()) % parts][word] = count
    return iter(found)


class Source:
    """Sends a batch to the next mapper whenever one is due; to each mapper at most WINDOW are under way."""

    def __init__(self, number: int, mappers: list[Any], sends_again: bool) -> None:
        self.number, self.mappers, self.sends_again = number, mappers, sends_again
        self.failed = 0

    def run(self, start_s: float, batches: int, every_s: float) -> int:
        """All batches; gives how many calls of a mapper have failed."""
        under_way: list[deque[tuple[Part, Any]]] = [deque() for _ in self.mappers]
        for number in range(batches):
            part = Part(self.number, number, number % len(self.mappers), start_s + number * every_s)
            time.sleep(max(0.0, part.due_s - time.time()))
            queue = under_way[part.mapper]
            queue.append((part, self.send(part)))
            while queue and (len(queue) > WINDOW or flow.wait([queue[0][1]], timeout=0)[0]):
                self.settle(*queue.popleft())
        for queue in under_way:
            while queue:
                self.settle(*queue.popleft())
        return self.failed

    def send(self, part: Part) -> Any:
        """One batch to its mapper."""
        return self.mappers[part.mapper].map.remote(part, sentences(part.source, part.number))

    def settle(self, part: Part, ref: Any) -> None:
        """Wait until the mapper has done with a batch."""
        try:
            flow.get(ref)
        except flow.ActorDied:
            self.failed += 1
            if self.sends_again:
                self.settle(part, self.send(part))


class Mapper:
    """Cuts sentences into words, and sends each reducer those of its keys."""

    def __init__(self, reducers: list[Any]) -> None:
        self.reducers = reducers

    def map(self, part: Part, batch: list[str]) -> None:
        """One batch; returns when its words are counted, so that no more are under way than sources have sent."""
        parts = split(counted(batch), len(self.reducers))
        flow.get([reducer.add.remote(part, words) for reducer, words in zip(self.reducers, parts, strict=True)])


class Reducer:
    """Counts the words of its keys."""

    def __init__(self, sink: Any) -> None:
        self.sink = sink
        self.words: Counter[str] = Counter()
        self.parts: Counter[tuple[int, int]] = Counter()

    def add(self, part: Part, words: dict[str, int]) -> None:
        """One part of a batch."""
        self.words.update(words)
        self.parts[part.source, part.number] += 1
        self.sink.arrive.remote(part.mapper, part.due_s)

    def flush(self) -> None:
        """Returns when the sink has all that was counted here: calls of one caller run in their order."""
        flow.get(self.sink.count.remote())

    def totals(self) -> tuple[Counter[str], Counter[tuple[int, int]]]:
        """The words, and how often a part of each batch has come."""
        return self.words, self.parts


class Sink:
    """Notes when results come out of the stream."""

    def __init__(self) -> None:
        self.arrivals: list[Arrival] = []

    def arrive(self, mapper: int, due_s: float) -> None:
        """A part has been counted."""
        now_s = time.time()
        self.arrivals.append(Arrival(mapper, now_s, now_s - due_s))

    def count(self) -> int:
        """How many have come."""
        return len(self.arrivals)

    def all(self) -> list[Arrival]:
        """All that have come."""
        return self.arrivals
