"""8-bit weights on a GPU: the gain in speed, the cost in acceptance rate, and the change of the target's distribution.

Speed is measured on the LLaMA-7B-shaped pair of decoding.py, with the draft rounded, and with both models rounded.
Acceptance and the target's distribution are measured on the zoo, whose models are trained. The zoo ships in 8 bits, so
rounding its weights again would change nothing. Therefore weights are first rescaled in ways that cancel out: the model
computes the same, but its weights are no longer multiples of the 8-bit step. Rounding the draft never changes the
output; a rounded target is another model.

    python benchmarks/gpu/rounded.py [--rounds 5]
"""

import argparse
import gc
import statistics

import torch
from decoding import AGREEMENT, CASES, measure
from floor import bandwidth, provenance, spread

import shallowdraft as sd
from shallowdraft.models.synthetic import make_pair
from shallowdraft.prompts import load_prompts

PAIR = "7b-wide"
ZOO_DRAFTS, LOOKAHEAD, NEW = ("1x256", "2x192", "4x128", "8x96"), 4, 64


def speed(rounds: int) -> None:
    """Print tokens per second and the share of the floor, by precision of target and draft."""
    case, bytes_s = CASES[PAIR], bandwidth()
    print(f"{PAIR}, lookahead {case.lookahead}; memory is read at {bytes_s / 1e12:.2f} TB/s")
    for kinds in (("bfloat16", "bfloat16"), ("bfloat16", "int8"), ("int8", "int8")):
        pair = make_pair(case.target, case.draft, AGREEMENT, device="cuda", dtype=torch.bfloat16)
        for model, kind in zip((pair.target, pair.draft), kinds, strict=True):
            model.decoder.pack("int8" if kind == "int8" else None)
        target_s, draft_s = (
            shape.pass_parameters * (1 if kind == "int8" else 2) / bytes_s
            for shape, kind in zip((case.target, case.draft), kinds, strict=True)
        )
        for name, draft, steps in (("plain", None, 0), ("speculative", pair.draft, case.lookahead)):
            measured = measure(pair, draft, max(1, steps), rounds)
            iteration_s = statistics.median(each.iteration_s for each in measured)
            share, speeds = (target_s + steps * draft_s) / iteration_s, [each.tokens_per_s for each in measured]
            print(
                f"  target {kinds[0]:<8} draft {kinds[1]:<8} {name:<12} {spread(speeds)} "
                f"tokens/s, iteration {1e3 * iteration_s:.3f} ms, {share:.1%} of its floor",
                flush=True,
            )
        del pair, model, draft
        gc.collect()
        torch.cuda.empty_cache()


@torch.no_grad()
def loaded(name: str, kind: str) -> sd.Model:
    """Load a zoo model, move its weights off the 8-bit grid, and round them again if `kind` is int8."""
    model = sd.load(f"zoo:{name}", "float32", trainable=True)
    decoder, shape = model.decoder, model.shape
    assert shape.gated
    random = torch.Generator().manual_seed(0)

    def factors(count: int) -> torch.Tensor:
        return torch.randn(count, generator=random).mul(0.1).exp().to(decoder.device)

    for block in decoder.blocks:
        for norm, projection in ((block.attn_norm, block.qkv), (block.ffn_norm, block.up)):
            projection.weight.mul_(norm.weight)
            norm.weight.fill_(1)
        # A factor per neuron of the MLP, and per dimension of the values; the next matrix divides by it
        neurons, values = factors(shape.ffn), factors(shape.kv_heads * shape.head_dim)
        block.up.weight[shape.ffn :].mul_(neurons[:, None])
        block.down.weight.div_(neurons)
        block.qkv.weight[-len(values) :].mul_(values[:, None])
        heads = values.view(shape.kv_heads, 1, -1).expand(-1, shape.heads // shape.kv_heads, -1)
        block.out.weight.div_(heads.reshape(-1))
    decoder.head.weight = torch.nn.Parameter(decoder.head.weight * decoder.norm.weight)  # no longer the embedding
    decoder.norm.weight.fill_(1)
    decoder.to(torch.bfloat16 if decoder.device.type == "cuda" else torch.float32)
    decoder.pack("int8" if kind == "int8" else None)
    return sd.Model(f"{name} in {kind}", decoder, model.tokenizer, model.stop_tokens)


def acceptance() -> None:
    """Print TAR with drafts in 16 and 8 bits, and the difference between the target in 16 and 8 bits."""
    target, rounded = loaded("target", "16 bits"), loaded("target", "int8")
    prompts = [target.encode(prompt.text) for prompt in load_prompts("zoo")]
    plain = sd.generate(target, prompts, max_new_tokens=NEW, stop_tokens=())
    print(f"zoo:target, {len(prompts)} prompts, {NEW} tokens, greedy, lookahead {LOOKAHEAD}: TAR")
    for name in ZOO_DRAFTS:
        tars = []
        for kind in ("16 bits", "int8"):
            outs = sd.generate(
                target, prompts, draft=loaded(name, kind), lookahead=LOOKAHEAD, max_new_tokens=NEW, stop_tokens=()
            )
            tars.append(statistics.fmean(out.stats.tar for out in outs))
        print(f"  {name:<8} draft in 16 bits {tars[0]:.3f}, in 8 bits {tars[1]:.3f}")
    divergences, same = [], []
    with torch.inference_mode():
        for prompt, out in zip(prompts, plain, strict=True):
            text = torch.tensor([[*prompt, *out.token_ids]], device=target.device)
            logits = (model.decoder.logits(text)[0, len(prompt) - 1 : -1] for model in (target, rounded))
            p, q = (model_logits.float().log_softmax(-1) for model_logits in logits)  # [tokens, vocabulary]
            divergences.append((p.exp() * (p - q)).sum(-1).mean().item())
            same.append((p.argmax(-1) == q.argmax(-1)).float().mean().item())
    print(
        f"zoo:target in 8 bits against 16 bits, on text that it writes in 16 bits: KL divergence "
        f"{statistics.fmean(divergences):.2e} nats per token (worst prompt {max(divergences):.2e}), "
        f"the same most likely token in {statistics.fmean(same):.2%}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    print(provenance())
    acceptance()
    speed(args.rounds)


if __name__ == "__main__":
    main()
