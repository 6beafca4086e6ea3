"""Training in several processes under torchrun: FSDP2 shards the model, each process takes its rows of every batch.

Every process draws the same batch from the same seed and keeps every N-th row of it, so N processes train on exactly
the tokens that one process would. Losses are divided by the rows of the whole batch and multiplied by N, because FSDP
averages gradients over processes; the mean that is reported, and the gradients, are therefore those of one process up
to the order of floating-point sums. Without torchrun every function returns its input, so the training loop is written
once.
"""

from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils._pytree import tree_map

from shallowdraft.distributed import is_first, processes, rank
from shallowdraft.errors import OptionError
from shallowdraft.models.checkpoint import assemble
from shallowdraft.models.decoder import Decoder

_Tree = TypeVar("_Tree")


def wait_for_all() -> None:
    """Wait until every process has come to this point."""
    if dist.is_initialized():
        dist.barrier()


def shard(model: Decoder) -> None:
    """Spread weights, gradients and optimiser state over the processes, a block at a time."""
    if processes() == 1 or isinstance(model, FSDPModule):
        return
    mesh = init_device_mesh(model.device.type, (processes(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    # The outermost module last: it takes what the blocks left, embedding, final norm and head.
    fully_shard(model, mesh=mesh)
    register_fsdp_forward_method(model, "logits")


def gather_model(model: Decoder) -> Decoder:
    """Return the model unsharded, in every process; all of them must call this."""
    if not isinstance(model, FSDPModule):
        return model
    model.reshard()  # a forward pass leaves the outermost weights unsharded
    return assemble(model.shape, {name: unshard(model.get_parameter(name)).detach() for name in model.shape.layout()})


def rows_of_this_process(batch: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return this process's rows of a batch that all processes drew alike."""
    if processes() == 1:
        return batch
    if len(batch) % processes():
        raise OptionError(f"a batch of {len(batch)} sequences cannot be split over {processes()} processes evenly")
    return batch[rank() :: processes()]


def mean_over_processes(value: Tensor) -> float:
    """Return the mean of a scalar over the processes."""
    if processes() > 1:
        dist.all_reduce(value)
    return float(value) / processes()


def decision_of_the_first(value: bool, device: torch.device) -> bool:
    """Return the first process's value in every process.

    Whoever saves, or stops, must do it after the same step as all others: saving gathers shards from every process.
    """
    if processes() == 1:
        return value
    # Only the first process adds 1, so that the sum is its value.
    flag = torch.tensor(float(value and is_first()), device=device)
    dist.all_reduce(flag)
    return bool(flag)


def average_gradients(module: nn.Module | None) -> None:
    """Average the gradients of a module that FSDP does not shard, of which every process holds all parameters."""
    if processes() == 1 or module is None:
        return
    for parameter in module.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)
            parameter.grad /= processes()


def unshard(tree: _Tree) -> _Tree:
    """Return nested containers with every sharded tensor gathered; all processes must call this."""
    gathered: _Tree = tree_map(lambda leaf: leaf.full_tensor() if isinstance(leaf, DTensor) else leaf, tree)
    return gathered


def load_model(model: nn.Module, state: dict[str, Tensor]) -> None:
    """Load whole tensors into a model that may be sharded."""
    model.load_state_dict({name: _shard_like(model.get_parameter(name), tensor) for name, tensor in state.items()})


def load_optimiser(optimiser: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Load whole moments into the optimiser of a model that may be sharded."""
    parameters = [parameter for group in optimiser.param_groups for parameter in group["params"]]
    for index, values in state["state"].items():
        for name, value in values.items():
            if isinstance(value, Tensor) and value.dim():  # AdamW's step count is a scalar and stays whole
                values[name] = _shard_like(parameters[index], value)
    optimiser.load_state_dict(state)


def _shard_like(parameter: Tensor, value: Tensor) -> Tensor:
    if not isinstance(parameter, DTensor):
        return value
    return distribute_tensor(value, parameter.device_mesh, parameter.placements)
