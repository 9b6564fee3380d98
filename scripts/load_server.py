"""Puts many different requests before a server at once, and says whether every one got its own answer.

    python scripts/serve.py checkpoint=checkpoints/shipped/eagle3 target.dtype=float32
    python scripts/load_server.py concurrent=200 seconds=600 out=load.json

First each prompt is asked alone at temperature 0. Then CONCURRENT clients ask all the time: streamed and whole, at temperatures 0 and 1,
with and without drafts, some leave in the middle, some send what cannot be answered. At temperature 0 every answer should be
the one that was given alone; in bfloat16 the other rows of a batch may decide ties. The memory of the server is followed on /metrics.
"""

from helpers.options import SPLIT, option, options, run

import asyncio
import json
import random
import statistics
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from specdec.core import loopback
from train import progress
from train.data import reading

BAD = [b"{", b'{"messages": []}', b'{"messages": [{"role": "user", "content": "a"}], "temperature": "hot"}']
GOLDEN = 0.6180339887
EVERY = 15.0  # seconds between two looks at memory
MEMORY = "process_resident_memory_bytes"


@dataclass(frozen=True)
class LoadServer:
    url: str = option("http://127.0.0.1:8000", "the server")
    prompts: str = option("data/prompts_heldout.jsonl", "rows with a prompt or messages: JSONL, folder or dataset")
    split: str | None = option(None, SPLIT)
    limit: int = option(24, "ask this many prompts, spread over the file")
    max_tokens: int = option(32, "longest answer")
    concurrent: int = option(200, "clients that ask at once")
    seconds: float = option(60.0, "how long they go on asking")
    seed: int = option(0, "seed of what they ask")
    out: str = field(default="load.json", metadata={"help": "file for the figures"})


@dataclass
class Load:
    """What the clients saw."""

    chosen: LoadServer
    questions: list[list[dict]]
    client: httpx.AsyncClient
    alone: list[str] = field(default_factory=list)
    counts: Counter = field(default_factory=Counter)
    seconds: list[float] = field(default_factory=list)  # of whole answers
    tokens: int = 0
    begun: int = 0  # requests of all clients
    wrong: list[dict] = field(default_factory=list)  # answers at temperature 0 that are not those given alone
    memory: list[tuple[float, float]] = field(default_factory=list)  # seconds since the start, bytes
    task: progress.Task | None = None  # while all ask

    def body(self, number: int, **more) -> dict:
        return {"messages": self.questions[number], "max_tokens": self.chosen.max_tokens, "temperature": 0, **more}

    async def ask(self, body: dict, *, leave_after: int | None = None) -> str | None:
        """The text of an answer; None if it was left, or refused because the queue was full."""
        if not body.get("stream"):
            answer = await self.client.post("/v1/chat/completions", json=body)
            if answer.status_code == 429:
                return None
            answer.raise_for_status()
            document = answer.json()
            self.tokens += document["usage"]["completion_tokens"]
            return document["choices"][0]["message"]["content"]
        text, num = "", 0
        async with self.client.stream("POST", "/v1/chat/completions", json=body) as answer:
            if answer.status_code == 429:
                return None
            answer.raise_for_status()
            async for line in answer.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                document = json.loads(line.removeprefix("data: "))
                if "error" in document:
                    raise ValueError(document["error"]["message"])
                for choice in document["choices"]:
                    text += choice["delta"].get("content") or ""
                if usage := document.get("usage"):
                    self.tokens += usage["completion_tokens"]
                num += 1
                if leave_after is not None and num > leave_after:
                    return None
        return text

    async def one(self, draw: random.Random) -> None:
        """One request of any kind."""
        number, kind = (
            draw.randrange(len(self.questions)),
            self.begun * GOLDEN % 1,
        )  # so all kinds come early, and evenly
        self.begun += 1
        body = self.body(number, stream=draw.random() < 0.5, speculate=draw.random() < 0.8)
        if body["stream"]:
            body["stream_options"] = {"include_usage": True}
        start = time.monotonic()
        if kind < 0.05:
            headers = {"Content-Type": "application/json"}
            answer = await self.client.post("/v1/chat/completions", content=draw.choice(BAD), headers=headers)
            self.counts["malformed, refused" if answer.status_code == 400 else "malformed, not refused"] += 1
        elif kind < 0.15:
            await self.ask(body | {"stream": True}, leave_after=draw.randrange(1, 6))
            self.counts["left"] += 1
        elif kind < 0.5:
            text = await self.ask(
                body | {"temperature": 1, "top_p": draw.choice([1, 0.9]), "seed": draw.randrange(1000)}
            )
            self.count(text, "sampled", start)
        else:
            text = await self.ask(body)
            self.count(text, "greedy", start)
            if text is not None and text != self.alone[number]:
                self.wrong.append({"prompt": number, "alone": self.alone[number], "now": text})

    def count(self, text: str | None, name: str, start: float) -> None:
        self.counts["refused, queue full" if text is None else name] += 1
        if text is not None:
            self.seconds.append(time.monotonic() - start)
            if self.task:
                self.task.advance()

    async def keep_asking(self, draw: random.Random, until: float) -> None:
        while time.monotonic() < until:
            try:
                await self.one(draw)
            except (httpx.HTTPError, ValueError, KeyError) as error:
                self.counts[f"failed: {type(error).__name__}: {str(error)[:80]}"] += 1
            else:
                await asyncio.sleep(0.05 * draw.random())

    async def follow_memory(self, start: float) -> None:
        while True:
            text = (await self.client.get("/metrics")).text
            found = [line.rpartition(" ")[2] for line in text.splitlines() if line.startswith(MEMORY + " ")]
            self.memory += [(time.monotonic() - start, float(value)) for value in found]
            await asyncio.sleep(EVERY)

    def figures(self, seconds: float) -> dict:
        third = len(self.memory) // 3
        means = [
            statistics.fmean(value for _, value in part)
            for part in (self.memory[third : 2 * third], self.memory[2 * third :])
            if part
        ]
        return {
            "seconds": seconds,
            "requests": dict(self.counts),
            "tokens_per_second": self.tokens / seconds,
            "median_seconds": statistics.median(self.seconds) if self.seconds else None,
            "greedy_answers_other_than_alone": len(self.wrong),
            "memory_of_the_second_and_third_third_gb": [mean / 1e9 for mean in means],
            "most_memory_gb": max((value for _, value in self.memory), default=0) / 1e9,
            "differences": self.wrong[:20],
        }


async def load(chosen: LoadServer) -> dict:
    rows = reading.spread(reading.load_prompts(chosen.prompts, split=chosen.split), chosen.limit)
    limits = httpx.Limits(max_connections=chosen.concurrent + 4)
    own = loopback.client_options(chosen.url)
    async with httpx.AsyncClient(base_url=chosen.url, timeout=None, limits=limits, **own) as client:
        work = Load(chosen, [row["messages"] for row in rows], client)
        try:
            await client.get("/health")
        except httpx.HTTPError as error:
            raise ValueError(
                f"No server answers at {chosen.url}{loopback.through(chosen.url)} ({error}): start scripts/serve.py, or give url=."
            ) from error
        for number in progress.track(range(len(rows)), "each prompt alone", unit="prompts"):
            work.alone.append(await work.ask(work.body(number, speculate=False)) or "")
        start, work.tokens = time.monotonic(), 0
        following = asyncio.ensure_future(work.follow_memory(start))
        draws = [random.Random(f"{chosen.seed} {number}") for number in range(chosen.concurrent)]
        with progress.start(f"{chosen.concurrent} clients", unit="answers") as task:
            work.task = task
            await asyncio.gather(*(work.keep_asking(draw, start + chosen.seconds) for draw in draws))
        following.cancel()
        return work.figures(time.monotonic() - start)


def main() -> None:
    chosen = options(LoadServer, __doc__)
    console = progress.Results()
    figures = asyncio.run(load(chosen))
    Path(chosen.out).write_text(json.dumps(figures, indent=1, ensure_ascii=False) + "\n")
    for name, value in figures.items():
        if name != "differences":
            console.print(f"{name.replace('_', ' '):<42} {value}")
    console.print(f"written to {chosen.out}")


if __name__ == "__main__":
    run(main)
