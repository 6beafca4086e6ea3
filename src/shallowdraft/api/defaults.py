"""Choices and defaults that the API and the command line share; commands import them to print a help text."""

from typing import Literal

StudyDrafter = Literal["model", "tree", "ngram", "skip", "medusa"]
"""Kinds of drafting that a study compares."""
ServingEngine = Literal["vllm", "sglang", "trtllm", "llama.cpp", "transformers"]
"""Engines that drafts are exported for."""

ALL_LOOKAHEADS = "1:12"
PROFILED_LOOKAHEADS = "1,2,3,4,5,6,8,12,16,24,32"  # times of the others lie between
