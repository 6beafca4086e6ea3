"""Who a model is: a digest of what its checkpoint folder holds, wherever that lies. No torch here.

Records name models by what somebody typed, and know them by this digest: other weights under the same path are another
model, the same weights under another path are the same one. Small files are read whole; of large ones the header, which
names every tensor and its size, and blocks spread over the file, so that 100 GB take about a second.
"""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

from shallowdraft.errors import CheckpointError
from shallowdraft.files import read_json

WHOLE_BYTES = 64 * 2**20  # a file up to this size is read whole
BLOCKS, BLOCK_BYTES = 1024, 2**14  # read of a larger one, evenly spread
LARGEST_HEADER_BYTES = 100 * 2**20  # safetensors allows no more
DIGITS = 16  # of the digest, in hexadecimal: 64 bits

_CONFIGS = ("config.json", "generation_config.json")
_WEIGHTS = ("*.safetensors", "*.bin", "*.gguf")
_NOT_CONTENT = ("_name_or_path", "transformers_version", "torch_dtype")


def folder_digest(folder: Path) -> str | None:
    """Digest of config and weights; None where the folder has no weights, so that nobody knows whose they are."""
    weights = sorted({file for pattern in _WEIGHTS for file in folder.glob(pattern) if file.is_file()})
    if not weights:
        return None
    digest = hashlib.sha256()
    for name in _CONFIGS:
        digest.update(_config(folder / name))
    for file in weights:
        digest.update(f"{file.name} {file.stat().st_size}".encode())
        for block in _sampled(file):
            digest.update(block)
    return digest.hexdigest()[:DIGITS]


def text_digest(*parts: object) -> str:
    """Digest of plain values, as their JSON is written."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:DIGITS]


def _config(file: Path) -> bytes:
    """What a config says, without what a copy or another version of transformers writes differently."""
    if not file.is_file():
        return b""
    content = read_json(file, CheckpointError)
    kept = {key: value for key, value in content.items() if key not in _NOT_CONTENT}
    return json.dumps(kept, sort_keys=True).encode()


def _sampled(file: Path) -> Iterator[bytes]:
    """All of a small file; of a large one its header and some blocks."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        if size <= WHOLE_BYTES:
            while block := stream.read(2**20):
                yield block
            return
        header_bytes = int.from_bytes(stream.read(8), "little") if file.suffix == ".safetensors" else BLOCK_BYTES
        yield stream.read(min(header_bytes, LARGEST_HEADER_BYTES))
        for number in range(BLOCKS):
            stream.seek(number * (size - BLOCK_BYTES) // (BLOCKS - 1))
            yield stream.read(BLOCK_BYTES)
