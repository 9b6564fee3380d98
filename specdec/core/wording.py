"""Numbers in sentences."""


def format_count(num: int, noun: str) -> str:
    """A number with its noun: 1 prompt, 2 prompts, 1,200 later turns. noun: the singular, whose plural has s or es"""
    ending = "es" if noun.endswith("s") else "s"
    return f"{num:,} {noun}{ending * (num != 1)}"
