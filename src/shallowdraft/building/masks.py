"""Learned masks: which parts of a parent stay is trained together with its weights (Sheared-LLaMA, Xia et al. 2023).

Each part has a hard-concrete gate z in [0, 1] (Louizos et al. 2018) with a learned location log a:

    u ~ uniform(0, 1),  s = sigmoid((log u - log(1 - u) + log a) / T),  z = clamp(s (1 + 2 e) - e, 0, 1)

with temperature T and stretch e, so that z is exactly 0 or 1 with a probability above 0 and yet has a gradient. A
Lagrangian constraint per family, lambda d + QUADRATIC d², with d the difference between the sparsity that is expected
and the one that is asked, drives the expected number of open gates to what the shape keeps; lambda moves with d. At
`FREEZE` the largest scores of each row are set to 1 and the others to 0, and only weights are trained on, so that
carving changes nothing.

Four things differ from the published code, which was tuned for thousands of steps and mild pruning: the score is
rescaled to reach 0 and 1 (else one layer of twelve is out of reach); log a is bounded where a gate still feels the
constraint, and so are the multipliers; between `RAMP` and `FREEZE` gates are pulled to the side that their rank puts
them on, harder and harder; the loss is the distance to the parent's own distributions.

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

from shallowdraft.building.pruning import KeptParts, require_reachable
from shallowdraft.building.tasks import Distillation
from shallowdraft.errors import OptionError, TrainingError
from shallowdraft.models.decoder import Decoder
from shallowdraft.shapes.shape import ModelShape

TEMPERATURE = 2 / 3  # T of the formula
STRETCH = 0.1  # e of the formula: the distribution of s reaches this far beyond 0 and 1, and is cut there
LOWEST, HIGHEST = -log(100), 2.0  # of log a; higher, a gate no longer feels the constraint
SHIFT = -TEMPERATURE * log(STRETCH / (1 + STRETCH))  # P(z > 0) = sigmoid(log a + SHIFT)
LARGEST_MULTIPLIER = 10.0
MULTIPLIER_TRAVEL = 50.0  # how far a multiplier could move in a run, over the error of the constraint
QUADRATIC = 10.0
COMMIT = 3.0  # strength of the pull to a gate's side just before the freeze, over the learning rate of log a
TRAVEL = 30.0  # how far log a could move in a run
RAMP = 0.45  # share of the steps over which the constraint tightens from nothing to the asked shape
FREEZE = 0.75  # share of the steps after which gates are 0 or 1
GAP = 0.5  # smallest difference between the last kept and the first dropped score that counts as converged
FEWEST_STEPS = 20  # on fewer some shapes do not converge: under 11 many, at 13 one of the zoo target's


class Masks(nn.Module):
    """The gates of a parent that is to be pruned to a shape; a family of which all parts stay has none."""

    def __init__(self, parent: ModelShape, shape: ModelShape) -> None:
        super().__init__()
        require_reachable(parent, shape)
        self.parent = parent
        group, kept_of_group = parent.heads // parent.kv_heads, shape.heads // shape.kv_heads
        families = {  # rows, parts, kept parts of a row
            "layers": (1, parent.layers, shape.layers),
            "groups": (parent.layers, parent.kv_heads, shape.kv_heads),
            "heads": (parent.layers * parent.kv_heads, group, kept_of_group),
            "ffn": (parent.layers, parent.ffn, shape.ffn),
            "hidden": (1, parent.d_model, shape.d_model),
        }
        self.keep = {name: keep for name, (_, parts, keep) in families.items() if keep < parts}
        if not self.keep:
            raise OptionError(f"the parent has the shape {shape} already; there is nothing to prune")
        # log a of each gate; all begin open, so that the first steps are the parent's own.
        self.locations = nn.ParameterDict({name: torch.full(families[name][:2], HIGHEST) for name in self.keep})
        # One lambda a family. A buffer, for it is raised by its own rule and not by the optimiser, yet saved.
        self.multipliers: Tensor
        self.register_buffer("multipliers", torch.zeros(len(self.keep)))

    def scores(self) -> dict[str, Tensor]:
        """Return the probability that a gate is open [R, N], rescaled so that the bounds of log a give 0 and 1.

        Without that a closed gate would count 0.047: eleven closed layers of twelve as half an open one.
        """
        lowest, highest = (float(torch.sigmoid(torch.tensor(SHIFT + bound))) for bound in (LOWEST, HIGHEST))
        return {
            name: (torch.sigmoid(location + SHIFT) - lowest) / (highest - lowest)
            for name, location in self.locations.items()
        }

    def sample(self, seed: int, step: int) -> dict[str, Tensor]:
        """Draw gates z for a step, differentiable in log a."""
        gates = {}
        for index, (name, location) in enumerate(self.locations.items()):
            # From (seed, step) alone: a resumed run, and the second pass of recomputed activations, draw the same.
            uniform = np.random.default_rng([seed, step, index]).uniform(1e-6, 1 - 1e-6, location.shape)
            noise = torch.from_numpy(np.log(uniform) - np.log1p(-uniform)).to(location)
            soft = torch.sigmoid((noise + location) / TEMPERATURE)
            gates[name] = (soft * (1 + 2 * STRETCH) - STRETCH).clamp(0, 1)
        return gates

    def hard(self) -> dict[str, Tensor]:
        """Return gates of 0 or 1: in each row, the largest scores are open, in the number that the shape keeps."""
        return {
            name: torch.zeros_like(score).scatter_(1, score.topk(self.keep[name], 1).indices, 1.0)
            for name, score in self.scores().items()
        }

    def excess(self, ramp: float) -> dict[str, Tensor]:
        """Return d [R]: by how much fewer parts a row keeps than it should at this point of the ramp.

        Both are shares of the parts. At ramp 0 nothing is to be dropped, at ramp 1 all that the shape drops.
        """
        return {
            name: (1 - score.mean(1)) - ramp * (1 - self.keep[name] / score.shape[1])
            for name, score in self.scores().items()
        }

    def gaps(self) -> dict[str, float]:
        """Return each family's smallest difference, over its rows, of the last kept and the first dropped score."""
        gaps = {}
        for name, score in self.scores().items():
            ranked = score.detach().sort(1, descending=True).values
            gaps[name] = float((ranked[:, self.keep[name] - 1] - ranked[:, self.keep[name]]).min())
        return gaps

    def require_converged(self) -> None:
        """Raise unless every family has told apart what it keeps from what it drops."""
        for name, gap in self.gaps().items():
            if gap < GAP:
                raise TrainingError(
                    f"the masks did not converge: the last kept and the first dropped of {name} score only {gap:.2f} "
                    f"apart, {GAP} is needed; train on more tokens, so that there are more steps ({FEWEST_STEPS} "
                    "at least), or prune by importance"
                )

    def kept_parts(self) -> KeptParts:
        """Return what to carve out of the parent."""
        self.require_converged()
        shape, gates = self.parent, self.hard()
        layers = _open_gates(gates["layers"][0]) if "layers" in gates else torch.arange(shape.layers)
        hidden = _open_gates(gates["hidden"][0]) if "hidden" in gates else torch.arange(shape.d_model)
        groups, heads, ffn = [], [], []
        for layer in layers.tolist():
            groups.append(_open_gates(gates["groups"][layer]) if "groups" in gates else torch.arange(shape.kv_heads))
            heads.append(_kept_heads(shape, gates, layer, groups[-1]))
            ffn.append(_open_gates(gates["ffn"][layer]) if "ffn" in gates else torch.arange(shape.ffn))
        return KeptParts(tuple(layers.tolist()), tuple(groups), tuple(heads), tuple(ffn), hidden)


def require_enough_steps(steps: int) -> None:
    """Raise where masks would hardly converge."""
    if steps < FEWEST_STEPS:
        raise OptionError(
            f"learned masks would be trained on {steps} steps, and converge on {FEWEST_STEPS} at least; give more "
            "--tokens or --mask-tokens, fewer --batch-tokens, or --method importance"
        )


def _open_gates(gates: Tensor) -> Tensor:
    return gates.nonzero().flatten().cpu()


def _kept_heads(shape: ModelShape, gates: dict[str, Tensor], layer: int, groups: Tensor) -> Tensor:
    """Return the query heads of a layer that stay: in each kept group those with open gates, or all."""
    per_group = shape.heads // shape.kv_heads
    heads = []
    for group in groups.tolist():
        # Rows of the family "heads" are numbered layer * G + group.
        in_group = torch.arange(per_group)
        if "heads" in gates:
            in_group = _open_gates(gates["heads"][layer * shape.kv_heads + group])
        heads.append(group * per_group + in_group)
    return torch.cat(heads)


@contextmanager
def applied(decoder: Decoder, gates: dict[str, Tensor]) -> Iterator[None]:
    """Scale the decoder's parts by the gates; a gate of 0 leaves the part out, exactly as carving would."""
    shape = decoder.shape
    with ExitStack() as stack:

        def change_output(module: nn.Module | None, hook: Callable[..., Any]) -> None:
            if module is not None:
                stack.callback(module.register_forward_hook(hook).remove)

        def scale_input(module: nn.Module, gate: Tensor) -> None:
            stack.callback(module.register_forward_pre_hook(lambda _, args: (args[0] * gate,)).remove)

        head_gates = _head_gates(shape, gates)
        for layer, block in enumerate(decoder.blocks):
            if "layers" in gates:
                change_output(block, _between_input_and_output(gates["layers"][0, layer]))
            # Heads and neurons are scaled where they enter the projection back into the residual stream.
            if head_gates is not None:
                scale_input(block.get_submodule("out"), head_gates[layer].repeat_interleave(shape.head_dim))
            if "ffn" in gates:
                scale_input(block.get_submodule("down"), gates["ffn"][layer])
        if "hidden" in gates:
            # A residual channel is gone when nothing writes to it and no norm counts it or hands it on.
            gate = gates["hidden"][0]
            writers: list[nn.Module | None] = [decoder.project_in or decoder.embed, decoder.positions]
            norms = [decoder.norm]
            for block in decoder.blocks:
                writers += [block.get_submodule(name) for name in ("out", "down")]
                norms += [block.get_submodule(name) for name in ("attn_norm", "ffn_norm")]
            for writer in writers:
                change_output(writer, lambda _, __, output: output * gate)
            for norm in norms:
                change_output(norm, _norm_of_kept(gate))
        yield


def _head_gates(shape: ModelShape, gates: dict[str, Tensor]) -> Tensor | None:
    """Return gates of query heads [L, H]: a group's gate times that of the head within it."""
    if "groups" not in gates and "heads" not in gates:
        return None
    group = gates["groups"][..., None] if "groups" in gates else 1.0  # [L, G, 1]
    head = gates["heads"].view(shape.layers, shape.kv_heads, -1) if "heads" in gates else 1.0  # [L, G, H / G]
    both = torch.as_tensor(group * head)
    return both.expand(-1, -1, shape.heads // shape.kv_heads).flatten(1)


def _between_input_and_output(gate: Tensor) -> Callable[..., Tensor]:
    """Return a hook that blends a block's input and output: at 0 the block is skipped, at 1 unchanged, both exactly."""
    return lambda _, args, output: torch.lerp(args[0], output, gate.to(output.dtype))


def _norm_of_kept(gate: Tensor) -> Callable[..., Tensor]:
    """Return a hook that takes a norm's mean and variance over the channels that stay, weighted by their gates [C].

    A norm over all C channels, some of them zero, would divide by a root mean square that is too small.
    """

    def hook(norm: nn.Module, args: tuple[Tensor, ...], _: Tensor) -> Tensor:
        assert isinstance(norm, nn.LayerNorm | nn.RMSNorm)
        x, share = args[0], gate / gate.sum()
        if isinstance(norm, nn.LayerNorm):
            x = x - (x * share).sum(-1, keepdim=True)
        x = x * torch.rsqrt((x.square() * share).sum(-1, keepdim=True) + (norm.eps or 0.0)) * norm.weight
        return (x if isinstance(norm, nn.RMSNorm) else x + norm.bias) * gate

    return hook


class _Phase(NamedTuple):
    """How far a run has come, and what its gates do then."""

    step: int
    ramp: float
    """Share of the constraint that is asked for, from 0 to 1."""
    commit: float
    """Strength of the pull to a gate's side; 0 up to `RAMP`, `COMMIT` at `FREEZE`."""
    frozen: bool


class MaskTraining(Distillation):
    """Weights and masks trained together on the parent's distributions, under the constraint to a shape."""

    may_rise = True  # while the constraint tightens, less and less of the model is there

    def __init__(self, parent: Decoder, shape: ModelShape, objective: str = "forward-kl", *, seed: int = 0) -> None:
        super().__init__(parent, objective, seed=seed)
        self.shape = shape
        self.masks = Masks(parent.shape, shape).to(parent.device)
        self.learned = self.masks
        self._phase = _Phase(0, 0.0, 0.0, frozen=False)
        self._steps = 1

    @property
    def description(self) -> dict[str, Any]:
        return super().description | {"job": "shear", "wanted": str(self.shape)}

    def learned_rate(self, steps: int) -> float:
        # AdamW moves a parameter by about the learning rate a step, so log a can cross its range in runs of any length.
        return TRAVEL / steps

    def begin(self, step: int, steps: int) -> None:
        frozen = step >= int(FREEZE * steps)
        if frozen and not self._phase.frozen:
            self.masks.require_converged()
        self._steps = steps
        ramp = min(1.0, step / max(1.0, RAMP * steps))
        commit = COMMIT * max(0.0, step / steps - RAMP) / (FREEZE - RAMP)
        self._phase = _Phase(step, ramp, commit, frozen)

    def gates(self) -> dict[str, Tensor]:
        """Return the gates of the present step."""
        return self.masks.hard() if self._phase.frozen else self.masks.sample(self.seed, self._phase.step)

    def active(self, model: Decoder) -> AbstractContextManager[None]:
        return applied(model, self.gates())

    def penalty(self) -> Tensor | None:
        if self._phase.frozen:
            return None
        excess = self.masks.excess(self._phase.ramp)
        total = torch.zeros((), device=self.masks.multipliers.device)
        for multiplier, d in zip(self.masks.multipliers, excess.values(), strict=True):
            total = total + (multiplier * d + QUADRATIC * d.square()).mean()
        return total

    def end(self) -> dict[str, float]:
        with torch.no_grad():
            excess = torch.stack([d.mean() for d in self.masks.excess(self._phase.ramp).values()])
            if not self._phase.frozen:
                # Gradient ascent on lambda: it moves with d for as long as the constraint is violated.
                self.masks.multipliers += MULTIPLIER_TRAVEL / self._steps * excess
                self.masks.multipliers.clamp_(-LARGEST_MULTIPLIER, LARGEST_MULTIPLIER)
                pull = self._phase.commit * self.learned_rate(self._steps)
                for location, kept in zip(self.masks.locations.values(), self.masks.hard().values(), strict=True):
                    location.add_(pull * (2 * kept - 1)).clamp_(LOWEST, HIGHEST)
        return {"sparsity_error": float(excess.abs().max()), "gap": min(self.masks.gaps().values())}
