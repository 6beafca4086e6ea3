"""The folder of a run: the name of every file in it."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class RunFolder:
    """Paths of a run's files; a file may be missing."""

    path: Path

    @property
    def trace(self) -> Path:
        """The target's outputs (runs/trace.py)."""
        return self.path / "trace.jsonl"

    @property
    def profile(self) -> Path:
        """Times of iterations (runs/profile.py)."""
        return self.path / "profile.jsonl"

    @property
    def replays(self) -> Path:
        """Acceptance of every proposer (runs/replays.py)."""
        return self.path / "replays.jsonl"

    @property
    def live(self) -> Path:
        """Live runs of the best candidates (runs/live.py)."""
        return self.path / "live.jsonl"

    @property
    def tokens(self) -> Path:
        """Sources of the tokens of some outputs (runs/tokens.py); earlier versions called it inside.jsonl."""
        earlier = self.path / "inside.jsonl"
        named = self.path / "tokens.jsonl"
        return earlier if earlier.exists() and not named.exists() else named

    @property
    def skip_replays(self) -> Path:
        """Replays of the target with skipped parts (replaying/skip.py), kept as they take long."""
        return self.path / "skips.jsonl"

    @property
    def study(self) -> Path:
        """The result of the study (runs/study.py)."""
        return self.path / "study.json"

    @property
    def accuracy(self) -> Path:
        """Task accuracy of the drafts (runs/accuracy.py)."""
        return self.path / "accuracy.json"

    @property
    def search(self) -> Path:
        """Candidates that a search for a draft has built and judged (runs/search.py)."""
        return self.path / "search.jsonl"

    @property
    def json_lines(self) -> list[Path]:
        """Every file of JSON lines; `bench` may have written some under any name."""
        return sorted(self.path.glob("*.jsonl"))
