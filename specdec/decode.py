"""The round loop: propose, verify, keep. Plain decoding is the same loop with a tree of one node."""

import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from specdec import masks, verify
from specdec.cache import RowCache
from specdec.proposers.base import Proposer
from specdec.target import Target
from specdec.tree import root


@dataclass(frozen=True)
class Round:
    """What one round emitted, row by row; rows that had finished emit nothing."""

    tokens: list[list[int]]  # [B][.] accepted drafts, then the target's own token, cut at the end of the answer
    accepted: list[int]  # [B] how many of them were drafted


@dataclass
class Generation:
    """Answers and how they came about. The first token of an answer comes from reading the prompt, outside all rounds."""

    tokens: list[list[int]]  # [B][.] the answers
    accepted: list[list[int]]  # [B][rounds] drafts emitted by each round; a round emits one token more than that
    seconds: float = 0.0  # all rounds, wall clock
    prefill_seconds: float = 0.0
    stages: dict[str, float] = field(default_factory=lambda: {"draft": 0.0, "verify": 0.0, "keep": 0.0})

    def split(self) -> list["Generation"]:
        """One for each row; the clocks are shared out equally."""
        share = 1 / len(self.tokens)
        return [
            Generation(
                [tokens],
                [accepted],
                self.seconds * share,
                self.prefill_seconds * share,
                {name: spent * share for name, spent in self.stages.items()},
            )
            for tokens, accepted in zip(self.tokens, self.accepted)
        ]


class Decoder:
    """Draft and verify without changing the target's distribution; `proposer=None` is plain decoding.

    temperature 0 is greedy. `stop` ends an answer at (and including) any of these token ids.
    """

    def __init__(self, target: Target, proposer: Proposer | None, *, temperature: float, stop: set[int]):
        if temperature < 0:
            raise ValueError(f"decode.temperature={temperature} must be 0 (greedy) or above.")
        self.target, self.proposer = target, proposer
        self.temperature, self.stop = temperature, stop
        self.layers = proposer.target_layers if proposer else ()

    def generate(
        self, prompts: list[list[int]], max_new_tokens: int, *, generator: torch.Generator | None = None
    ) -> Generation:
        """prompts: B lists of token ids -> answers of at most `max_new_tokens` each"""
        result = Generation([[] for _ in prompts], [[] for _ in prompts])
        for emitted in self.stream(prompts, max_new_tokens, generator=generator, result=result):
            for row, tokens in enumerate(emitted.tokens):
                result.tokens[row] += tokens
        return result

    @torch.inference_mode()
    def stream(
        self,
        prompts: list[list[int]],
        max_new_tokens: int,
        *,
        generator: torch.Generator | None = None,
        result: Generation | None = None,
    ) -> Iterator[Round]:
        """Yields what the prompt's own pass and then every round emitted; counts and clocks go into `result`."""
        result = result or Generation([[] for _ in prompts], [[] for _ in prompts])
        self._check(prompts, max_new_tokens)
        device = self.target.device
        clock = self._now()
        num = torch.tensor([len(prompt) for prompt in prompts], device=device)  # [B]
        padded = torch.nn.utils.rnn.pad_sequence([torch.tensor(p) for p in prompts], batch_first=True).to(
            device
        )  # [B, T]
        cache = self.target.cache(len(prompts))
        newest, features = self._prefill(padded, num, cache, generator)  # [B], [B, T, F*D]
        if self.proposer:
            self.proposer.begin(padded, num)
            following = torch.cat([padded[:, 1:], newest[:, None]], dim=1)  # [B, T]
            following[torch.arange(len(num), device=device), num - 1] = newest
            self.proposer.commit(following, features, num)
        left = [max_new_tokens] * len(prompts)
        draws = verify.Draws(generator)
        emitted = self._cut([[token] for token in newest.tolist()], left)
        result.prefill_seconds += self._now() - clock
        yield Round(emitted, [0] * len(prompts))

        while any(left):
            start = self._now()
            tree = self.proposer.propose(self.temperature, generator) if self.proposer else root(newest)
            drafted = self._now()
            num_nodes = tree.tokens.shape[1]
            ancestors = tree.ancestors()  # [B, N, N]
            cache.reserve(num_nodes)
            output = self.target.read(
                tree.tokens,
                self.layers,
                positions=cache.lengths[:, None] + tree.depths(),
                mask=masks.pending(ancestors, cache.lengths, cache.visible),
                cache=cache,
            )
            logits = self.target.logits(output.final)  # [B, N, V]
            if self.temperature == 0:
                path, num_kept, newest = verify.greedy(tree, logits.argmax(-1))
            else:
                path, num_kept, newest = verify.sample(tree, verify.probabilities(logits, self.temperature), draws)
            counts = num_kept.tolist()
            verified = self._now()
            most = max(counts)
            cache.keep(path, num_kept, most)
            path = path[:, :most]  # [B, P]
            accepted = tree.tokens.gather(1, path)  # [B, P], the root first
            following = torch.cat([accepted[:, 1:], newest[:, None]], dim=1)  # [B, P]
            following[torch.arange(len(counts), device=device), num_kept - 1] = newest
            if self.proposer:
                features = output.features.gather(1, path[..., None].expand(-1, -1, output.features.shape[-1]))
                self.proposer.commit(following, features, num_kept)
            running = [n > 0 for n in left]
            emitted = self._cut([row[:n] for row, n in zip(following.tolist(), counts)], left)
            drafts = [max(0, len(row) - 1) for row in emitted]
            for row, count in enumerate(drafts):
                if running[row]:
                    result.accepted[row].append(count)
            end = self._now()
            for stage, spent in (("draft", drafted - start), ("verify", verified - drafted), ("keep", end - verified)):
                result.stages[stage] += spent
            result.seconds += end - start
            yield Round(emitted, drafts)

    def _prefill(self, padded: Tensor, num: Tensor, cache: RowCache, generator) -> tuple[Tensor, Tensor]:
        """Reads the prompts. -> the first token of each answer [B], the prompts' features [B, T, F*D]"""
        num_rows, length = padded.shape
        cache.reserve(length)
        positions = torch.arange(length, device=padded.device).expand(num_rows, -1)
        mask = masks.pending(masks.causal(length, padded.device), cache.lengths, cache.visible)
        output = self.target.read(padded, self.layers, positions=positions, mask=mask, cache=cache)
        cache.commit(num, length)
        logits = self.target.logits(output.final[torch.arange(num_rows, device=num.device), num - 1])  # [B, V]
        if self.temperature == 0:
            return logits.argmax(-1), output.features
        law = verify.probabilities(logits, self.temperature)
        return torch.multinomial(law, 1, generator=generator)[:, 0], output.features

    def _cut(self, emitted: list[list[int]], left: list[int]) -> list[list[int]]:
        """Ends each row at a stop token or at its budget; `left` is counted down, to 0 where an answer has ended."""
        for row, tokens in enumerate(emitted):
            end = next((i + 1 for i, token in enumerate(tokens) if token in self.stop), None)
            emitted[row] = tokens[: min(end or len(tokens), left[row])]
            ended = end is not None and end <= left[row]
            left[row] = 0 if ended else left[row] - len(emitted[row])
        return emitted

    def _check(self, prompts: list[list[int]], max_new_tokens: int) -> None:
        if not prompts or not all(prompts) or max_new_tokens < 1:
            raise ValueError(
                "Decoding needs at least one prompt, every prompt at least one token, and max_new_tokens >= 1."
            )
        limit = self.target.config.max_position_embeddings
        depth = self.proposer.depth if self.proposer else 0
        longest = max(len(prompt) for prompt in prompts)
        if longest + max_new_tokens + depth > limit:
            raise ValueError(
                f"A prompt of {longest} tokens, {max_new_tokens} new ones and {depth} drafts exceed the target's "
                f"{limit} positions: shorten the prompt or lower max_new_tokens."
            )

    def _now(self) -> float:
        if self.target.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()
