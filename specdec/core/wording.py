"""Numbers in sentences."""


def format_count(num: int, noun: str) -> str:
    """A number with its noun: 1 prompt, 2 prompts, 1,200 later turns. noun: the singular of one whose plural has s"""
    return f"{num:,} {noun}{'s' * (num != 1)}"
