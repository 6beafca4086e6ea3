"""The processes that torchrun started together. Without torchrun this process counts as the only one."""

import os
import time
from datetime import timedelta

import torch
import torch.distributed as dist


def launched() -> int:
    """Return the number of processes that torchrun started, joined or not."""
    return int(os.environ["WORLD_SIZE"]) if "LOCAL_RANK" in os.environ else 1


def join(device: torch.device) -> torch.device:
    """Join the other processes of a torchrun, if there are any, and return this process's device."""
    if "LOCAL_RANK" not in os.environ:
        return device
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        # The first process may read a large corpus while the others wait.
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=timedelta(days=1))
    return device


def processes() -> int:
    """Return how many processes have joined."""
    return dist.get_world_size() if dist.is_initialized() else 1


def rank() -> int:
    """Return this process's number, from 0; it is the same before joining and after leaving."""
    if dist.is_initialized():
        return dist.get_rank()
    return int(os.environ["RANK"]) if "LOCAL_RANK" in os.environ else 0


def is_first() -> bool:
    """Return whether this process is the one that writes files and prints."""
    return rank() == 0


def leave() -> None:
    """Leave the other processes, if this one has joined any."""
    if dist.is_initialized():
        dist.destroy_process_group()
        # gloo's threads take the interpreter's lock to release the last tensors; one that asks for it once the
        # interpreter has begun to shut down aborts the process.
        time.sleep(0.2)
