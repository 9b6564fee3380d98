"""The text of an answer up to a stop string, piece by piece, while its tokens arrive."""

from collections.abc import Sequence

from specdec.core.answer_text import TextStream


class StoppedText:
    """Turns tokens into pieces of text, which together are the answer's text before the first stop string.

    stop_strings: texts that end the answer; text that may begin one of them is kept back
    """

    def __init__(self, stream: TextStream, stop_strings: Sequence[str] = ()):
        self.stream, self.stop_strings = stream, tuple(stop_strings)
        self.kept_back = ""
        self.stopped = False

    def add(self, token: int) -> str:
        """The text that the next token completes; it may be empty."""
        return self._release(self.stream.add(token))

    def end(self) -> str:
        """The text that was kept back."""
        text = self._release(self.stream.end()) + self.kept_back
        self.kept_back = ""
        return text

    def _release(self, new_text: str) -> str:
        if self.stopped:
            return ""
        text = self.kept_back + new_text
        starts = [text.find(string) for string in self.stop_strings if string in text]
        if starts:
            self.stopped, self.kept_back = True, ""
            return text[: min(starts)]
        keep = max((_overlap(text, string) for string in self.stop_strings), default=0)
        self.kept_back = text[len(text) - keep :]
        return text[: len(text) - keep]


def _overlap(text: str, string: str) -> int:
    """The length of the longest end of the text with which the string begins."""
    return next((num for num in range(min(len(text), len(string) - 1), 0, -1) if text.endswith(string[:num])), 0)
