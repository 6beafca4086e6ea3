"""Find the fastest draft of the zoo's target in Python: first each stage by itself, then all of them as a study.

    python examples/zoo_study.py [FOLDER]

Nothing is downloaded. Every stage prints a table; FOLDER (by default zoo-study) holds the files of the run, which
docs/runs.md describes, and the HTML report. docs/api.md explains each call.
"""

import sys
from pathlib import Path

import shallowdraft as sd

folder = Path(sys.argv[1] if len(sys.argv) > 1 else "zoo-study")
drafts = ["zoo:2x192", "zoo:4x128"]
trace = sd.record("zoo:target", "zoo", folder / "trace.jsonl", limit=8, max_new_tokens=32)
replays = sd.replay(trace, drafts)
profile = sd.profile("zoo:target", drafts, folder / "profile.jsonl", lookaheads="2,4,6", rounds=1)
predictions = sd.predict(replays, profile)
print(trace.caption, replays, predictions, sep="\n\n")
study = sd.study(
    "zoo:target", drafts, prompts="zoo", out=folder, limit=8, max_new_tokens=32, lookaheads="2,4,6", rounds=1
)
print(study)
print(sd.report(folder).page)
