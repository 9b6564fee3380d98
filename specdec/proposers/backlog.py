"""What a head has not read yet: prompts, and what was committed since it drafted."""

FORGET = 0.98  # what a round counts for the usual number of joining tokens after the next one


class Backlog:
    """Numbers of tokens. A head that drafts reads all of them first."""

    def __init__(self) -> None:
        self.unread: list[int] = []  # of each row
        self.newly = 0  # that the last round committed, which a head reads in any case
        self.joined, self.joining = 0, 0.0  # of prompts that joined since the last round, and in most rounds

    @property
    def late(self) -> int:
        """Those that a head has to read beside what the last round committed."""
        return max(0, sum(self.unread) - self.newly)

    def begin(self, num_rows: int) -> None:
        self.unread, self.newly = [0] * num_rows, 0

    def commit(self, counts: list[int], *, opening: bool) -> None:
        """counts: new tokens of each row; opening: they are those of the prompts"""
        self.unread = [before + count for before, count in zip(self.unread, counts, strict=True)]
        self.newly = 0 if opening else sum(counts)

    def select(self, rows: list[int]) -> None:
        self.unread = [self.unread[row] for row in rows]

    def replace(self, rows: list[int], counts: list[int]) -> None:
        """Prompts of so many tokens take the places of these rows."""
        for row, count in zip(rows, counts, strict=True):
            self.unread[row] = count
        self.joined += sum(counts)

    def next_round(self) -> None:
        self.joining, self.joined = FORGET * self.joining + (1 - FORGET) * self.joined, 0

    def read(self) -> int:
        """The head reads all. -> how many of them were late"""
        late = self.late
        self.unread = [0] * len(self.unread)
        return late
