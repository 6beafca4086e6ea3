"""Speculative decoding beside transformers' assisted generation, on the same weights in one run.

Both outputs are compared by the rule of docs/lossless.md: where they differ, the logits must tie.

    python benchmarks/gpu/peers.py [--pair 7b-wide] [--rounds 3]
"""

import argparse
import statistics
import time
from random import Random
from typing import Any

import torch
import transformers
from decoding import AGREEMENT, CASES, NEW, PROMPT
from floor import provenance, spread

import shallowdraft as sd
from shallowdraft.decoding.divergence import explain
from shallowdraft.models.synthetic import make_pair


def as_transformers(model: sd.Model) -> Any:
    """Return the model as transformers' own class, with the same weights in memory."""
    shape, dense = model.shape, model.decoder.dense_state()
    settings = {key: value for key, value in shape.to_config().items() if key != "architectures"}
    config = transformers.AutoConfig.for_model(**settings)
    state = {}
    for name, parts in shape.layout().items():
        pieces = dense[name].split([part.size[0] for part in parts])
        state |= {part.name: piece for part, piece in zip(parts, pieces, strict=True)}
    with torch.device("meta"):
        peer = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    peer.load_state_dict(state, assign=True, strict=False)
    peer.model.rotary_emb = type(peer.model.rotary_emb)(config=config, device="cuda")
    return peer.eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pair", default="7b-wide", choices=list(CASES))
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    case = CASES[args.pair]
    pair = make_pair(case.target, case.draft, AGREEMENT, device="cuda", dtype=torch.bfloat16)
    for model in (pair.target, pair.draft):
        model.decoder.pack()
    target, draft = as_transformers(pair.target), as_transformers(pair.draft)
    draft.generation_config.num_assistant_tokens = case.lookahead
    draft.generation_config.num_assistant_tokens_schedule = "constant"
    speeds: dict[str, list[float]] = {"ours": [], "transformers": []}

    def ours(prompt: list[int]) -> list[int]:
        options = {"draft": pair.draft, "lookahead": case.lookahead, "max_new_tokens": NEW, "stop_tokens": ()}
        return sd.generate(pair.target, prompt, **options).token_ids

    def theirs(prompt: list[int]) -> list[int]:
        ids = torch.tensor([prompt], device="cuda")
        return target.generate(
            ids, assistant_model=draft, do_sample=False, max_new_tokens=NEW, eos_token_id=None, pad_token_id=0,
            attention_mask=torch.ones_like(ids),
        )[0, PROMPT:].tolist()  # fmt: skip

    candidates = {"ours": ours, "transformers": theirs}
    same = ties = 0
    for number in range(args.rounds + 1):
        prompt = [(11 * number + position) % case.target.vocab for position in range(PROMPT)]
        texts = {}
        for name in Random(number).sample(list(candidates), len(candidates)):
            begin_s = time.perf_counter()
            texts[name] = candidates[name](prompt)
            elapsed_s = time.perf_counter() - begin_s
            speeds[name].extend([NEW / elapsed_s] if number else [])  # the first round compiles and captures
        difference = explain(pair.target, prompt, texts["transformers"], texts["ours"])
        assert difference is None or difference.tie, str(difference)
        same, ties = same + (difference is None), ties + (difference is not None)
    print(provenance(), f"transformers {transformers.__version__}")
    print(f"{args.pair}, lookahead {case.lookahead}, prompt {PROMPT}, {NEW} tokens, prefill included, taking turns")
    for name, tokens_per_s in speeds.items():
        print(f"  {name:<13} {spread(tokens_per_s)} tokens/s")
    ratios = [fast / slow for fast, slow in zip(speeds["ours"], speeds["transformers"], strict=True)]
    print(f"  ratio {statistics.median(ratios):.1f}; {same} outputs identical, {ties} differ where the logits tie")


if __name__ == "__main__":
    main()
