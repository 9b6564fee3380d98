"""The text of an answer, piece by piece, while its tokens come."""

from collections.abc import Callable, Sequence

BROKEN = "\ufffd"  # stands for bytes that are no whole character yet
CONTEXT = 8  # tokens before the new ones that are decoded with them, as spaces depend on what is before


class StreamedText:
    """Turns tokens into pieces of text that together are the decoded answer.

    decode: token ids -> text
    stop_strings: the text ends before the first of them, and what may be the beginning of one is kept back
    before: the tokens of a text that the answer continues
    """

    def __init__(
        self, decode: Callable[[list[int]], str], stop_strings: Sequence[str] = (), before: Sequence[int] = ()
    ):
        self.decode, self.stop_strings = decode, tuple(stop_strings)
        self.tokens = list(before[-CONTEXT:])
        self.start, self.read = 0, len(self.tokens)  # of the tokens that are decoded together; of those not given out
        self.kept_back = ""
        self.stopped = False

    def add(self, token: int) -> str:
        """The piece of text that the next token completes; empty if it ends inside of a character."""
        self.tokens.append(token)
        before = self.decode(self.tokens[self.start : self.read])
        text = self.decode(self.tokens[self.start :])
        if text.endswith(BROKEN) and len(self.tokens) - self.read < CONTEXT:
            return ""
        self.start, self.read = max(0, len(self.tokens) - CONTEXT), len(self.tokens)
        return self._release(text[len(before) :])

    def end(self) -> str:
        """What was kept back."""
        before = self.decode(self.tokens[self.start : self.read])
        rest = self._release(self.decode(self.tokens[self.start :])[len(before) :]) + self.kept_back
        self.read, self.kept_back = len(self.tokens), ""
        return rest

    def _release(self, piece: str) -> str:
        if self.stopped:
            return ""
        text = self.kept_back + piece
        places = [place for string in self.stop_strings if (place := text.find(string)) >= 0]
        if places:
            self.stopped, self.kept_back = True, ""
            return text[: min(places)]
        keep = max((_overlap(text, string) for string in self.stop_strings), default=0)
        self.kept_back = text[len(text) - keep :]
        return text[: len(text) - keep]


def _overlap(text: str, string: str) -> int:
    """The length of the longest end of the text that begins the string."""
    return next((num for num in range(min(len(text), len(string) - 1), 0, -1) if text.endswith(string[:num])), 0)
