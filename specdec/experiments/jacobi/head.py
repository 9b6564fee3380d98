"""Consistency LLM (CLLM, 2403.00835): the target itself, tuned so that Jacobi iteration needs fewer passes."""

from specdec.core.option_types import Names, Positive, SmallCount, Width
from specdec.experiments.jacobi.proposer import Lookahead
from specdec.heads.adapter import AdaptsTarget
from specdec.target.model import Target


class Consistency(AdaptsTarget):
    """An adapter of the target and nothing else, without steps: the adapted target guesses its own next tokens.

    A round reads the newest token and the guesses behind it, as many as the decoder's depth; `num_drafts` is the number
    used in training. The target's output at these tokens verifies the guesses and provides those of the next round. So
    decoding needs no other model and no further pass. Outputs are those of the adapted target.
    """

    target_layers = ()

    def __init__(
        self,
        target: Target,
        *,
        num_drafts: SmallCount = 6,
        lora_rank: Width = 16,
        lora_alpha: Positive = 32,
        lora_modules: Names = ("q_proj", "v_proj"),
        vocab: None = None,
    ):
        if vocab is not None:
            raise ValueError("The guesses of this head are the target's own tokens: set vocab_size to null.")
        super().__init__(target, lora_rank=lora_rank, lora_alpha=lora_alpha, lora_modules=lora_modules, vocab=None)
        self.depth = num_drafts

    def make_proposer(self, drafting):
        """Jacobi iteration. Raises ValueError for a tree, which it does not draft."""
        if drafting.width > 1:
            raise ValueError(f"{type(self).__name__} drafts by Jacobi iteration, which gives a chain: set width=1.")
        return Lookahead(self.target, window=drafting.depth, ngram=2, guesses=0)
