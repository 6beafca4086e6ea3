"""Learned masks: which parts of a parent stay is trained together with its weights (Sheared-LLaMA, Xia et al. 2023).

Each part has a hard-concrete gate z in [0, 1] with a learned location log a; a Lagrangian constraint per family drives
the expected number of open gates to exactly what the wanted shape keeps. At `FREEZE` the largest scores of each row are
set to 1 and the rest to 0, and only weights are trained on, so that carving changes nothing.

Four things differ from the published code, which was tuned for thousands of steps and mild pruning: the score is
rescaled to reach 0 and 1 (else one layer of twelve is out of reach); log a is bounded where a gate still feels the
constraint, and so are the multipliers; between `RAMP` and `FREEZE` gates are pulled to where their rank puts them,
harder and harder; the loss is the distance to the parent's own distributions.

Shapes: a family of gates is [R rows, N parts], the same number kept in each row. L layers, G key/value heads, H query
heads, D head width, F ffn, C d_model.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from math import log
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from shallowdraft.building.jobs import Distil
from shallowdraft.building.pruning import Cut, require_reachable
from shallowdraft.errors import OptionError, TrainingError
from shallowdraft.models.decoder import Decoder
from shallowdraft.shapes.shape import ModelShape

TEMPERATURE = 2 / 3
STRETCH = 0.1  # a gate's law reaches this far beyond 0 and 1, and is cut there
LOWEST, HIGHEST = -log(100), 2.0  # of log a; higher, a gate no longer feels the constraint
SHIFT = -TEMPERATURE * log(STRETCH / (1 + STRETCH))
LARGEST_MULTIPLIER = 10.0
MULTIPLIER_TRAVEL = 50.0  # how far a multiplier could move in a run, over the error of the constraint
QUADRATIC = 10.0
COMMIT = 3.0  # at the freeze gates are pulled to where their rank puts them, so much harder than they are trained
TRAVEL = 30.0  # how far log a could move in a run
RAMP = 0.45  # share of the steps over which the constraint tightens
FREEZE = 0.75  # share of the steps after which gates are 0 or 1
GAP = 0.5  # between the last kept and the first dropped score
FEWEST_STEPS = 20  # on fewer some shapes do not converge: under 11 many, at 13 one of the zoo target's


class Masks(nn.Module):
    """The gates of a parent that is to be pruned to a shape; families that are kept whole have none."""

    def __init__(self, parent: ModelShape, wanted: ModelShape) -> None:
        super().__init__()
        require_reachable(parent, wanted)
        self.parent = parent
        group, kept_group = parent.heads // parent.kv_heads, wanted.heads // wanted.kv_heads
        families = {
            "layers": (1, parent.layers, wanted.layers),
            "groups": (parent.layers, parent.kv_heads, wanted.kv_heads),
            "heads": (parent.layers * parent.kv_heads, group, kept_group),
            "ffn": (parent.layers, parent.ffn, wanted.ffn),
            "hidden": (1, parent.d_model, wanted.d_model),
        }
        self.keep = {name: keep for name, (_, parts, keep) in families.items() if keep < parts}
        if not self.keep:
            raise OptionError(f"the parent has the shape {wanted} already; there is nothing to prune")
        self.locations = nn.ParameterDict({name: torch.full(families[name][:2], HIGHEST) for name in self.keep})
        self.multipliers: Tensor
        self.register_buffer("multipliers", torch.zeros(len(self.keep)))

    def scores(self) -> dict[str, Tensor]:
        """The chance that a gate is open [R, N], rescaled from what log a can reach to [0, 1]."""
        lowest, highest = (float(torch.sigmoid(torch.tensor(SHIFT + side))) for side in (LOWEST, HIGHEST))
        return {
            name: (torch.sigmoid(location + SHIFT) - lowest) / (highest - lowest)
            for name, location in self.locations.items()
        }

    def sample(self, seed: int, step: int) -> dict[str, Tensor]:
        """Gates drawn anew for a step, differentiable."""
        gates = {}
        for index, (name, location) in enumerate(self.locations.items()):
            uniform = np.random.default_rng([seed, step, index]).uniform(1e-6, 1 - 1e-6, location.shape)
            noise = torch.from_numpy(np.log(uniform) - np.log1p(-uniform)).to(location)
            soft = torch.sigmoid((noise + location) / TEMPERATURE)
            gates[name] = (soft * (1 + 2 * STRETCH) - STRETCH).clamp(0, 1)
        return gates

    def hard(self) -> dict[str, Tensor]:
        """Exactly as many open gates in each row as the wanted shape keeps."""
        return {
            name: torch.zeros_like(score).scatter_(1, score.topk(self.keep[name], 1).indices, 1.0)
            for name, score in self.scores().items()
        }

    def excess(self, ramp: float) -> dict[str, Tensor]:
        """How much sparser each row is than the constraint asks at this point of the ramp [R]."""
        return {
            name: (1 - score.mean(1)) - ramp * (1 - self.keep[name] / score.shape[1])
            for name, score in self.scores().items()
        }

    def gaps(self) -> dict[str, float]:
        """Between the last kept and the first dropped score, the smallest of all rows."""
        found = {}
        for name, score in self.scores().items():
            ranked = score.detach().sort(1, descending=True).values
            found[name] = float((ranked[:, self.keep[name] - 1] - ranked[:, self.keep[name]]).min())
        return found

    def require_converged(self) -> None:
        for name, gap in self.gaps().items():
            if gap < GAP:
                raise TrainingError(
                    f"the masks did not converge: the last kept and the first dropped of {name} score only {gap:.2f} "
                    f"apart, {GAP} is needed; train on more tokens, so that there are more steps ({FEWEST_STEPS} "
                    "at least), or prune by importance"
                )

    def cut(self) -> Cut:
        """What stays, for carving."""
        self.require_converged()
        shape, gates = self.parent, self.hard()
        layers = _kept(gates["layers"][0]) if "layers" in gates else torch.arange(shape.layers)
        every_group, per_group = torch.arange(shape.kv_heads), shape.heads // shape.kv_heads
        groups, heads, ffn = [], [], []
        for layer in layers.tolist():
            groups.append(_kept(gates["groups"][layer]) if "groups" in gates else every_group)
            rows = gates["heads"].view(shape.layers, shape.kv_heads, -1)[layer].cpu() if "heads" in gates else None
            of_group = [
                torch.arange(per_group) if rows is None else _kept(rows[group]) for group in groups[-1].tolist()
            ]
            heads.append(
                torch.cat([group * per_group + kept for group, kept in zip(groups[-1], of_group, strict=True)])
            )
            ffn.append(_kept(gates["ffn"][layer]) if "ffn" in gates else torch.arange(shape.ffn))
        hidden = _kept(gates["hidden"][0]) if "hidden" in gates else torch.arange(shape.d_model)
        return Cut(tuple(layers.tolist()), tuple(groups), tuple(heads), tuple(ffn), hidden)


def require_enough_steps(steps: int) -> None:
    """Raise where masks would hardly converge."""
    if steps < FEWEST_STEPS:
        raise OptionError(
            f"learned masks would be trained on {steps} steps, and converge on {FEWEST_STEPS} at least; give more "
            "--tokens or --mask-tokens, fewer --batch-tokens, or --method importance"
        )


def _kept(gates: Tensor) -> Tensor:
    return gates.nonzero().flatten().cpu()


@contextmanager
def applied(decoder: Decoder, gates: dict[str, Tensor]) -> Iterator[None]:
    """The decoder computes with its parts scaled by the gates; a gate of 0 leaves the part out."""
    shape = decoder.shape
    with ExitStack() as stack:

        def after(module: nn.Module | None, hook: Callable[..., Any]) -> None:
            if module is not None:
                stack.callback(module.register_forward_hook(hook).remove)

        def scale_input(module: nn.Module, gate: Tensor) -> None:
            stack.callback(module.register_forward_pre_hook(lambda _, args: (args[0] * gate,)).remove)

        heads = _head_gates(shape, gates)
        for layer, block in enumerate(decoder.blocks):
            if "layers" in gates:
                after(block, _between(gates["layers"][0, layer]))
            if heads is not None:
                scale_input(block.get_submodule("out"), heads[layer].repeat_interleave(shape.head_dim))
            if "ffn" in gates:
                scale_input(block.get_submodule("down"), gates["ffn"][layer])
        if "hidden" in gates:
            gate = gates["hidden"][0]
            writers: list[nn.Module | None] = [decoder.project_in or decoder.embed, decoder.positions]
            norms = [decoder.norm]
            for block in decoder.blocks:
                writers += [block.get_submodule(name) for name in ("out", "down")]
                norms += [block.get_submodule(name) for name in ("attn_norm", "ffn_norm")]
            for writer in writers:
                after(writer, lambda _, __, output: output * gate)
            for norm in norms:
                after(norm, _norm_of_kept(gate))
        yield


def _head_gates(shape: ModelShape, gates: dict[str, Tensor]) -> Tensor | None:
    """[L, H] from the gates of key/value heads and of query heads within them."""
    if "groups" not in gates and "heads" not in gates:
        return None
    group = gates["groups"][..., None] if "groups" in gates else 1.0
    head = gates["heads"].view(shape.layers, shape.kv_heads, -1) if "heads" in gates else 1.0
    both = torch.as_tensor(group * head)
    return both.expand(-1, -1, shape.heads // shape.kv_heads).flatten(1)


def _between(gate: Tensor) -> Callable[..., Tensor]:
    """From what enters a block to what leaves it; exact at both ends."""
    return lambda _, args, output: torch.lerp(args[0], output, gate.to(output.dtype))


def _norm_of_kept(gate: Tensor) -> Callable[..., Tensor]:
    """A norm whose mean and variance are taken over the dimensions that stay, weighted by their gates [C]."""

    def hook(norm: nn.Module, args: tuple[Tensor, ...], _: Tensor) -> Tensor:
        assert isinstance(norm, nn.LayerNorm | nn.RMSNorm)
        x, share = args[0], gate / gate.sum()
        if isinstance(norm, nn.LayerNorm):
            x = x - (x * share).sum(-1, keepdim=True)
        x = x * torch.rsqrt((x.square() * share).sum(-1, keepdim=True) + (norm.eps or 0.0)) * norm.weight
        return (x if isinstance(norm, nn.RMSNorm) else x + norm.bias) * gate

    return hook


class _Phase(NamedTuple):
    """Where a run stands."""

    step: int
    ramp: float
    commit: float
    frozen: bool


class Shear(Distil):
    """Weights and masks together: the parent's distributions, under the constraint to a shape."""

    may_rise = True

    def __init__(self, parent: Decoder, wanted: ModelShape, objective: str = "forward-kl", *, seed: int = 0) -> None:
        super().__init__(parent, objective, seed=seed)
        self.wanted = wanted
        self.masks = Masks(parent.shape, wanted).to(parent.device)
        self.learned = self.masks
        self._now = _Phase(0, 0.0, 0.0, frozen=False)
        self._steps = 1

    @property
    def description(self) -> dict[str, Any]:
        return super().description | {"job": "shear", "wanted": str(self.wanted)}

    def learned_rate(self, steps: int) -> float:
        return TRAVEL / steps

    def begin(self, step: int, steps: int) -> None:
        frozen = step >= int(FREEZE * steps)
        if frozen and not self._now.frozen:
            self.masks.require_converged()
        self._steps = steps
        ramp = min(1.0, step / max(1.0, RAMP * steps))
        commit = COMMIT * max(0.0, step / steps - RAMP) / (FREEZE - RAMP)
        self._now = _Phase(step, ramp, commit, frozen)

    def gates(self) -> dict[str, Tensor]:
        return self.masks.hard() if self._now.frozen else self.masks.sample(self.seed, self._now.step)

    def active(self, model: Decoder) -> AbstractContextManager[None]:
        return applied(model, self.gates())

    def penalty(self) -> Tensor | None:
        if self._now.frozen:
            return None
        excess = self.masks.excess(self._now.ramp)
        total = torch.zeros((), device=self.masks.multipliers.device)
        for multiplier, d in zip(self.masks.multipliers, excess.values(), strict=True):
            total = total + (multiplier * d + QUADRATIC * d.square()).mean()
        return total

    def end(self) -> dict[str, float]:
        with torch.no_grad():
            excess = torch.stack([d.mean() for d in self.masks.excess(self._now.ramp).values()])
            if not self._now.frozen:
                self.masks.multipliers += MULTIPLIER_TRAVEL / self._steps * excess
                self.masks.multipliers.clamp_(-LARGEST_MULTIPLIER, LARGEST_MULTIPLIER)
                pull = self._now.commit * self.learned_rate(self._steps)
                for location, kept in zip(self.masks.locations.values(), self.masks.hard().values(), strict=True):
                    location.add_(pull * (2 * kept - 1)).clamp_(LOWEST, HIGHEST)
        return {"sparsity_error": float(excess.abs().max()), "gap": min(self.masks.gaps().values())}
