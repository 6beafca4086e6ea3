"""Which lookahead to use next: from what the last iterations took and how much of them was accepted.

Plain decoding is lookahead 0 and always a candidate: where speculation does not pay, it stops, and is tried again now
and then. What is emitted does not depend on any of this.
"""

from collections.abc import Sequence

LONGEST = 8
FIRST = (4, 4, 0, 0, 2, 2, 0)  # tried to begin with
MEMORY = 0.95  # weight of what was known, at each new iteration
BETTER = 1.03  # how much faster another lookahead must look to be taken
LOOK_AROUND = 16  # iterations after which a neighbour is tried
TRIES = 3  # iterations, when it is
STALE = 0.2  # weight of what was known of acceptance before a pause
PATIENCE = (8, 64)  # plain iterations before speculation is tried again, doubled each time it did not pay


class LookaheadPolicy:
    """Remembers seconds by lookahead and acceptance by position; both fade."""

    def __init__(self, longest: int = LONGEST) -> None:
        self.longest = longest
        self._seconds: dict[int, float] = {}
        self._tried, self._kept = [0.5] * longest, [0.35] * longest  # a weak guess: seven tokens of ten are accepted
        self._planned = [min(d, longest) for d in FIRST]
        self._current = self._planned[0]
        self._age = 0
        self._patience = PATIENCE[0]

    def choose(self) -> int:
        """The lookahead of the next iteration."""
        if self._planned:
            return self._planned[0]
        return self._current

    def learn(self, lookahead: int, accepted: Sequence[int], seconds: float) -> None:
        """Take in one iteration: the draft tokens kept in each row, and how long it took."""
        known = self._seconds.get(lookahead)
        self._seconds[lookahead] = seconds if known is None else min(seconds, 2 * known) * 0.2 + known * 0.8
        for position in range(lookahead):
            reached = sum(kept >= position for kept in accepted)
            if reached:
                self._tried[position] = MEMORY * self._tried[position] + reached
                self._kept[position] = MEMORY * self._kept[position] + sum(kept > position for kept in accepted)
        if self._planned:
            self._planned.pop(0)
        if not self._planned:
            self._decide()

    def tar(self, lookahead: int) -> float:
        """Tokens an iteration, from the chance of each position once the one before it was kept."""
        total = chance = 1.0
        for tried, kept in zip(self._tried[:lookahead], self._kept, strict=False):
            chance *= kept / tried
            total += chance
        return total

    def seconds(self, lookahead: int) -> float:
        """Measured, or on the straight line through the measured ones next to it."""
        if lookahead in self._seconds:
            return self._seconds[lookahead]
        below = max((d for d in self._seconds if d < lookahead), default=None)
        above = min((d for d in self._seconds if d > lookahead), default=None)
        if below is not None and above is not None:
            share = (lookahead - below) / (above - below)
            return self._seconds[below] * (1 - share) + self._seconds[above] * share
        edge = below if below is not None else above
        assert edge is not None, "nothing was measured yet"
        slope = (self._seconds[max(self._seconds)] - self._seconds[min(self._seconds)]) / max(1, max(self._seconds))
        return max(1e-9, self._seconds[edge] + slope * (lookahead - edge))

    def speed(self, lookahead: int) -> float:
        return self.tar(lookahead) / self.seconds(lookahead)

    def _decide(self) -> None:
        best = max(range(self.longest + 1), key=self.speed)
        if self.speed(best) > BETTER * self.speed(self._current) or (
            best == 0 and self.speed(0) > self.speed(self._current)
        ):
            if self._current == 0:
                self._patience = PATIENCE[0]
            self._current, self._age = best, 0
        self._age += 1
        if self._current == 0:
            if self._age >= self._patience:
                self._age, self._patience = 0, min(2 * self._patience, PATIENCE[1])
                self._tried = [STALE * tried for tried in self._tried]
                self._kept = [STALE * kept for kept in self._kept]
                again = max(range(1, self.longest + 1), key=self.speed)
                self._planned = [again] * TRIES
        elif self._age % LOOK_AROUND == 0:
            other = self._current + (1 if self._age // LOOK_AROUND % 2 else -1)
            self._planned = [min(max(other, 0), self.longest)]
