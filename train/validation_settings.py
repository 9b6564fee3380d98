"""How a drafter is judged while it is trained, as conf/train.yaml says in `validation`."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ValidationSettings:
    """conf/train.yaml, `validation`; train/ranges.py has checked them."""

    num_prompts: int
    max_new_tokens: int
    temperature: float
    decode: str
    auto: str
    share: float | None  # of the training time; None: any
    answers: str  # folder

    def check(self, *, replays: bool, engine: bool, ema: float | None) -> None:
        """Raises ValueError for what needs replay where it does not apply.

        replays: whether the drafter can be judged by replay; engine: whether a server reads the texts; ema: of `train`
        """
        if engine and not replays:
            raise ValueError(
                "features.engine=: without the target in this process a drafter is judged by replay, which needs a chain "
                "(decode=chain) and validation.decode=best or end. Or use features.mode=online."
            )
        if ema is not None and not replays:
            raise ValueError(
                f"train.ema={ema} lets replay choose between the weights and their average, and replay does not apply "
                "here: it needs a chain (decode=chain), a head that leaves the target as it is, train.best_by=tau, and "
                "validation.decode=best or end. Or set train.ema=null."
            )
