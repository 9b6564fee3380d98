"""Consistency LLM (CLLM, 2403.00835): the target itself, tuned so that Jacobi iteration needs fewer passes for a text."""

from specdec.heads.adapter import AdaptsTarget
from specdec.target import Target


class Consistency(AdaptsTarget):
    """An adapter of the target and nothing else: it has no step, the adapted target guesses for itself.

    A round reads the newest token and guesses behind it, as many as decode.depth says (`num_drafts` is what it was
    trained for); what the target says at them verifies them, and is the next round's guesses. So decoding needs no other
    model and no further pass, and outputs are those of the adapted target.
    """

    attends = "itself"
    target_layers = ()

    def __init__(
        self,
        target: Target,
        *,
        num_drafts: int = 6,
        lora_rank: int = 16,
        lora_alpha: int = 32,
        lora_modules: tuple[str, ...] = ("q_proj", "v_proj"),
        vocab: None = None,
    ):
        if vocab is not None:
            raise ValueError("The guesses of head=consistency are the target's own tokens: set head.vocab_size=null.")
        if num_drafts < 1:
            raise ValueError(f"head.drafter.num_drafts={num_drafts} must be at least 1.")
        super().__init__(target, lora_rank=lora_rank, lora_alpha=lora_alpha, lora_modules=lora_modules, vocab=None)
        self.depth = num_drafts

    def cache(self, batch):
        raise self._stepless()

    def encode(self, features):
        raise self._stepless()

    def step(self, d, h, tokens, positions, mask, cache):
        raise self._stepless()

    def logits(self, d, readout):
        raise self._stepless()

    def _stepless(self) -> TypeError:
        return TypeError(f"{type(self).__name__} has no step: it attends {self.attends}, so the target guesses.")
