"""Several processes under torchrun: FSDP2 shards the model, each process takes its rows of every batch.

Without torchrun every function here leaves things as they are, so the training loop is written once.
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

from shallowdraft.distributed import is_first as is_first
from shallowdraft.distributed import join as join
from shallowdraft.distributed import leave as leave
from shallowdraft.distributed import processes as processes
from shallowdraft.distributed import rank as rank
from shallowdraft.errors import OptionError
from shallowdraft.models.checkpoint import assemble
from shallowdraft.models.decoder import Decoder

_T = TypeVar("_T")


def wait() -> None:
    """Until every process is here."""
    if dist.is_initialized():
        dist.barrier()


def shard(model: Decoder) -> None:
    """Spread weights, gradients and optimiser state over the processes, a block at a time."""
    if processes() == 1 or isinstance(model, FSDPModule):
        return
    mesh = init_device_mesh(model.device.type, (processes(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    register_fsdp_forward_method(model, "logits")


def gathered(model: Decoder) -> Decoder:
    """The model in one piece, in every process."""
    if not isinstance(model, FSDPModule):
        return model
    model.reshard()  # a forward pass leaves the outermost weights in one piece
    return assemble(model.shape, {name: whole(model.get_parameter(name)).detach() for name in model.shape.layout()})


def own_rows(batch: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """The rows of this process, of a batch that all processes drew alike."""
    if processes() == 1:
        return batch
    if len(batch) % processes():
        raise OptionError(f"a batch of {len(batch)} sequences cannot be split over {processes()} processes evenly")
    return batch[rank() :: processes()]


def mean(value: Tensor) -> float:
    """Over the processes."""
    if processes() > 1:
        dist.all_reduce(value)
    return float(value) / processes()


def agreed(value: bool, device: torch.device) -> bool:
    """What the first process says."""
    if processes() == 1:
        return value
    flag = torch.tensor(float(value and is_first()), device=device)
    dist.all_reduce(flag)
    return bool(flag)


def average_gradients(module: nn.Module | None) -> None:
    """Of parameters that every process holds whole."""
    if processes() == 1 or module is None:
        return
    for parameter in module.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)
            parameter.grad /= processes()


def whole(tree: _T) -> _T:
    """Every sharded tensor in one piece; all processes must ask."""
    gathered: _T = tree_map(lambda leaf: leaf.full_tensor() if isinstance(leaf, DTensor) else leaf, tree)
    return gathered


def load_model(model: nn.Module, state: dict[str, Tensor]) -> None:
    model.load_state_dict({name: _like(model.get_parameter(name), tensor) for name, tensor in state.items()})


def load_optimiser(optimiser: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    parameters = [parameter for group in optimiser.param_groups for parameter in group["params"]]
    for index, values in state["state"].items():
        for name, value in values.items():
            if isinstance(value, Tensor) and value.dim():
                values[name] = _like(parameters[index], value)
    optimiser.load_state_dict(state)


def _like(parameter: Tensor, value: Tensor) -> Tensor:
    if not isinstance(parameter, DTensor):
        return value
    return distribute_tensor(value, parameter.device_mesh, parameter.placements)
