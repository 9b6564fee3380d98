"""Decides in which rounds Auto spends time to learn: a round without drafts, or a trial of a head that did not pay; and in which
rounds it does not look at texts.

Learning may cost a small share of the speed. So what it costs decides how many rounds pass between two such rounds.
"""

TRIALS = 0.01  # share of the speed that trials of a head that does not pay may cost
LONGEST_WAIT = 512  # rounds between two of them
CHECKS, RESTS = 0.005, 8  # share of the speed that rounds to see what nothing costs may take; least rounds between them
LONGEST_REST = 8  # rounds


class Rhythm:
    """Counts the rounds since each rare event."""

    def __init__(self) -> None:
        self.waited, self.trying = 0, False  # rounds since the head drafted; whether a trial goes on in the next round
        self.drafted, self.advantage = 0, 1.0  # rounds since one without drafts; speed of the last one over one without
        self.idle, self.rested = 0, 0  # rounds since the last draft; how many of the last ones did not look at texts

    def begin(self) -> None:
        """New prompts, which the head has to read."""
        self.waited = max(1, self.waited)

    def checks_plain(self) -> bool:
        """Whether this round should draft nothing, to see what that takes."""
        return self.drafted >= max(RESTS, (self.advantage - 1) / CHECKS)

    def rests(self, looking: float, fastest: float, *, check: bool) -> bool:
        """Whether texts are not looked at in this round, which is counted: for long nothing was worth drafting, and looking takes time.

        looking: seconds that it takes; fastest: seconds of the fastest round; check: whether this round drafts nothing in any case
        """
        resting = looking > TRIALS * fastest and self.rested < min(LONGEST_REST, self.idle // RESTS)
        self.rested = self.rested + 1 if resting and not check else 0
        return self.rested > 0

    def tries(self, lost: float, fastest: float) -> bool:
        """Whether a head that does not pay drafts in this round, for a trial of two rounds.

        lost: seconds that the trial is expected to lose; fastest: seconds of the fastest round
        """
        return self.trying or self.waited >= min(LONGEST_WAIT, lost / (TRIALS * fastest))

    def head_drafted(self, *, trial: bool) -> None:
        self.trying = trial and self.waited > 0  # then this round's time is not what the head takes as a rule
        self.waited = 0

    def head_waited(self) -> None:
        self.waited += 1

    def chose(self, size: int, *, advantage: float) -> None:
        """size: tokens of each row that the round verifies; advantage: its speed over that of one without drafts"""
        self.drafted = 0 if size == 1 else self.drafted + 1
        if size > 1:
            self.advantage = advantage

    def ended(self, *, any_draft: bool) -> None:
        self.idle = 0 if any_draft else self.idle + 1
