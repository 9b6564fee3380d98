"""Answers to conversations in one call: a target, its tokenizer, and what drafts for them (docs/api.md)."""

from dataclasses import dataclass
from typing import Any

import torch

from specdec.core.answer_text import TextDecoder
from specdec.core.generation import Generation
from specdec.core.sampling import Sampling
from specdec.decoding.drafting import Drafting
from specdec.loading import OpenTarget
from specdec.proposers.base import Proposer
from specdec.text import conversations


@dataclass
class ChatAnswer(Generation):
    """The answer to one conversation."""

    text: str = ""  # without special tokens


class Chat:
    """Answers conversations with a target and what drafts for it. specdec.load makes it.

    template: variables of the chat template
    """

    def __init__(self, opened: OpenTarget, proposer: Proposer, drafting: Drafting, template: dict[str, Any]):
        self.target, self.tokenizer, self.stop, self.proposer = opened.target, opened.tokenizer, opened.stop, proposer
        self._drafting, self._template, self._runner = drafting, template, drafting.runner()
        self._text_decoder = TextDecoder.from_tokenizer(self.tokenizer)

    def answer(
        self,
        messages: list[dict],
        max_new_tokens: int,
        *,
        sampling: Sampling | None = None,
        generator: torch.Generator | None = None,
        draft: bool = True,
    ) -> ChatAnswer:
        """The target's answer to messages with `role` and `content`, as in OpenAI's interface.

        sampling: None: greedy; generator: random numbers, on the target's device; draft: False for plain decoding
        Raises ValueError for messages that the chat template does not render, or that do not fit.
        """
        decoder = self._drafting.decoder(
            self.target,
            self.proposer if draft else None,
            sampling=sampling or Sampling(),
            stop=self.stop,
            runner=self._runner,
        )
        prompt = conversations.encode_prompt(self.tokenizer, messages, self._template)
        generation = decoder.generate([prompt], max_new_tokens, generator=generator)
        return ChatAnswer(**vars(generation), text=self._text_decoder.text(generation.tokens[0]))
