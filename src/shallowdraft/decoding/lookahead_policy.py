"""The choice of the next lookahead, from the times of the last iterations and the acceptance in them.

Expected speed at a lookahead is expected tokens an iteration over expected seconds an iteration.
Plain decoding is lookahead 0 and always a candidate: if speculation does not pay it stops, and is
tried again now and then. What is emitted does not depend on the choice.
"""

from collections.abc import Sequence

MAX_AUTO_LOOKAHEAD = 8
"""Largest lookahead that the policy chooses; buffers and random numbers are made for it."""
FIRST_LOOKAHEADS = (4, 4, 0, 0, 2, 2, 0)
"""Lookaheads of the first iterations: three of them, for a line through their times, and each more than once, because
the first iteration of a shape may take longer than the following ones."""
ACCEPTANCE_MEMORY = 0.95
"""Weight that earlier acceptance keeps at each iteration: about the last 20 count, so that the text is followed."""
TIME_WEIGHT = 0.2
"""Weight of a new time in the running mean of its lookahead: about the last 5 iterations count."""
MAX_SLOWDOWN = 2
"""A time counts as at most this multiple of the mean: one iteration that was interrupted must not decide."""
MIN_GAIN = 1.03
"""Expected gain in speed at which the lookahead is changed; a smaller one may be noise."""
PROBE_INTERVAL = 16
"""Iterations at one lookahead after which a neighbouring one is tried, so that its time stays known."""
RETRIAL_ITERATIONS = 3
"""Speculative iterations of a trial during plain decoding."""
PAUSE_MEMORY = 0.2
"""Weight that acceptance from before a pause keeps at a trial, because the text has changed meanwhile."""
PAUSES = (8, 64)
"""Plain iterations before the first trial and the most before any; doubled after each trial that did not pay."""


class LookaheadPolicy:
    """Running means of seconds by lookahead, and of acceptance by draft position."""

    def __init__(self, longest: int = MAX_AUTO_LOOKAHEAD) -> None:
        self.longest = longest
        self._seconds: dict[int, float] = {}
        # Faded counts of draft tokens by position: how often all before it were accepted, and how often it was, too.
        # They begin with half an observation at an acceptance rate of 0.7, which the first real ones outweigh.
        self._reached, self._accepted = [0.5] * longest, [0.35] * longest
        self._planned = [min(d, longest) for d in FIRST_LOOKAHEADS]
        self._current = self._planned[0]
        self._age = 0  # iterations at the current lookahead
        self._pause = PAUSES[0]

    def choose(self) -> int:
        """Return the lookahead of the next iteration."""
        if self._planned:
            return self._planned[0]
        return self._current

    def learn(self, lookahead: int, accepted: Sequence[int], seconds: float) -> None:
        """Learn from one iteration: the draft tokens accepted in each row, and how long it took."""
        mean = self._seconds.get(lookahead)
        if mean is None:
            self._seconds[lookahead] = seconds
        else:
            self._seconds[lookahead] = min(seconds, MAX_SLOWDOWN * mean) * TIME_WEIGHT + mean * (1 - TIME_WEIGHT)
        for position in range(lookahead):
            reached = sum(count >= position for count in accepted)
            if reached:
                further = sum(count > position for count in accepted)
                self._reached[position] = ACCEPTANCE_MEMORY * self._reached[position] + reached
                self._accepted[position] = ACCEPTANCE_MEMORY * self._accepted[position] + further
        if self._planned:
            self._planned.pop(0)
        if not self._planned:
            self._decide()

    def tar(self, lookahead: int) -> float:
        """Return the expected tokens an iteration.

        Position n is accepted with the product of the acceptance rates up to n, each given that
        those before were.
        """
        total = chance = 1.0
        for reached, accepted in zip(self._reached[:lookahead], self._accepted, strict=False):
            chance *= accepted / reached
            total += chance
        return total

    def seconds(self, lookahead: int) -> float:
        """Return the expected seconds of an iteration: measured, or on a straight line through measured ones."""
        if lookahead in self._seconds:
            return self._seconds[lookahead]
        below = max((d for d in self._seconds if d < lookahead), default=None)
        above = min((d for d in self._seconds if d > lookahead), default=None)
        if below is not None and above is not None:
            share = (lookahead - below) / (above - below)
            return self._seconds[below] * (1 - share) + self._seconds[above] * share
        edge = below if below is not None else above
        assert edge is not None, "nothing was measured yet"
        # Beyond the measured lookaheads: the mean slope, from the nearest measured one.
        slope = (self._seconds[max(self._seconds)] - self._seconds[min(self._seconds)]) / max(1, max(self._seconds))
        return max(1e-9, self._seconds[edge] + slope * (lookahead - edge))

    def speed(self, lookahead: int) -> float:
        """Return the expected tokens a second."""
        return self.tar(lookahead) / self.seconds(lookahead)

    def _decide(self) -> None:
        best = max(range(self.longest + 1), key=self.speed)
        # Plain decoding needs no margin: its speed does not depend on a guess of acceptance.
        if self.speed(best) > MIN_GAIN * self.speed(self._current) or (
            best == 0 and self.speed(0) > self.speed(self._current)
        ):
            if self._current == 0:
                self._pause = PAUSES[0]
            self._current, self._age = best, 0
        self._age += 1
        if self._current == 0:
            if self._age >= self._pause:
                self._plan_trial()
        elif self._age % PROBE_INTERVAL == 0:
            neighbour = self._current + (1 if self._age // PROBE_INTERVAL % 2 else -1)
            self._planned = [min(max(neighbour, 0), self.longest)]

    def _plan_trial(self) -> None:
        """Interrupt plain decoding by a few iterations at the best lookahead above 0."""
        self._age, self._pause = 0, min(2 * self._pause, PAUSES[1])
        self._reached = [PAUSE_MEMORY * reached for reached in self._reached]
        self._accepted = [PAUSE_MEMORY * accepted for accepted in self._accepted]
        again = max(range(1, self.longest + 1), key=self.speed)
        self._planned = [again] * RETRIAL_ITERATIONS
