"""Free memory of a device, and an error before it runs out."""

from pathlib import Path

import torch

from shallowdraft.errors import MemoryShortageError


def dtype_name(dtype: torch.dtype) -> str:
    """Return a dtype's name without `torch.`, as in `shapes.DTYPE_BYTES`."""
    return str(dtype).removeprefix("torch.")


def require_memory(needed_bytes: int, device: torch.device, what: str) -> None:
    """Raise unless `needed_bytes` are free on the device."""
    free = free_bytes(device)
    if free is not None and needed_bytes > free:
        raise MemoryShortageError(
            f"{what} needs {needed_bytes / 2**30:.2f} GiB on {device}, {free / 2**30:.2f} GiB are free; "
            "use a smaller dtype (--dtype bfloat16), fewer or shorter prompts, or a larger machine"
        )


def free_bytes(device: torch.device) -> int | None:
    """Return the free memory of a device in bytes, or None where the system does not tell."""
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)  # torch reuses it
        return torch.cuda.mem_get_info(device)[0] + cached
    limits = [free for free in (_system_free_bytes(), _cgroup_free_bytes()) if free is not None]
    return min(limits, default=None)


def _system_free_bytes() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)


def _cgroup_free_bytes() -> int | None:
    """Return the bytes left under a container's limit; the page cache counts as used there, but can be evicted."""
    folder = Path("/sys/fs/cgroup")
    try:
        limit = (folder / "memory.max").read_text().strip()
        used = int((folder / "memory.current").read_text())
        counts = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except OSError:
        return None
    return None if limit == "max" else int(limit) - used + int(counts.get("inactive_file", 0))
