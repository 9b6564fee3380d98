"""How many experts of a mixture the tokens of one pass use (docs/methods.md, section 8)."""

from dataclasses import dataclass

NUMBERS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
PER_TOKEN = ("num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts", "num_experts_per_token", "moe_top_k")


@dataclass(frozen=True)
class Experts:
    """Of a layer: `num` experts, of which each token uses `per_token`."""

    num: int
    per_token: int

    def hit(self, num_tokens: float) -> float:
        """The expected number of different experts that so many tokens use: E (1 - (1 - k/E)^N).

        Assumes that tokens choose independently and all experts alike, as MoESD does (2505.19645). Real tokens prefer some
        experts and neighbours choose alike, so they use fewer: it is an upper bound.
        """
        return self.num * (1 - (1 - self.per_token / self.num) ** num_tokens)


def experts_of(fields: dict) -> Experts | None:
    """Of a target with these fields of its text configuration; None for a dense one."""
    num = next((fields[name] for name in NUMBERS if isinstance(fields.get(name), int)), 1)
    per_token = next((fields[name] for name in PER_TOKEN if isinstance(fields.get(name), int)), 0)
    # Configurations of Doge and of Nemotron-H have numbers of experts that their dense models do not use
    mixture = fields.get("is_moe", True) and "moe" in (fields.get("layers_block_type") or ["moe"])
    return Experts(num, per_token) if mixture and 0 < per_token < num else None


def growth(experts: Experts | None, num_tokens: int) -> float:
    """What the cost of a pass is linear in: the number of tokens, or with experts the number of experts that they use."""
    return float(num_tokens) if experts is None else experts.hit(num_tokens)


def share_of_growth(experts: Experts | None, low: int, place: int, high: int) -> float:
    """Where the cost of a pass over `place` tokens is between those over `low` (0) and over `high` (1)."""
    at_low, at_place, at_high = (growth(experts, num) for num in (low, place, high))
    if at_low == at_high:
        return 0.0
    return (at_place - at_low) / (at_high - at_low)
