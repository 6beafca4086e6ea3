"""The identity of a model: a digest of the content of its checkpoint folder, wherever that is. No torch here.

Records hold the name that was typed and this digest: other weights under the same path are another model, and the same
weights under another path are the same model. Small files are read whole. Of large ones the header is read, which names
every tensor and its size, and blocks spread over the file, so that 100 GB take about a second.
"""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

from shallowdraft.errors import CheckpointError
from shallowdraft.files import read_json

WHOLE_BYTES = 64 * 2**20  # a file up to this size is read whole
BLOCKS, BLOCK_BYTES = 1024, 2**14  # read of a larger file, evenly spread
LARGEST_HEADER_BYTES = 100 * 2**20  # the limit of the safetensors format
DIGITS = 16  # of the digest, in hexadecimal: 64 bits

_CONFIGS = ("config.json", "generation_config.json")
_WEIGHTS = ("*.safetensors", "*.bin", "*.gguf")
_NOT_CONTENT = ("_name_or_path", "transformers_version", "torch_dtype")


def folder_digest(folder: Path) -> str | None:
    """Return the digest of config and weights; None if the folder has no weights, which could be of any model."""
    weights = sorted({file for pattern in _WEIGHTS for file in folder.glob(pattern) if file.is_file()})
    if not weights:
        return None
    digest = hashlib.sha256()
    for name in _CONFIGS:
        digest.update(_config_content(folder / name))
    for file in weights:
        digest.update(f"{file.name} {file.stat().st_size}".encode())
        for block in _sampled_blocks(file):
            digest.update(block)
    return digest.hexdigest()[:DIGITS]


def text_digest(*parts: object) -> str:
    """Return the digest of plain values, as JSON writes them."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:DIGITS]


def _config_content(file: Path) -> bytes:
    """Return a config without the keys that change when a model is copied or saved by another transformers."""
    if not file.is_file():
        return b""
    config = read_json(file, CheckpointError)
    content = {key: value for key, value in config.items() if key not in _NOT_CONTENT}
    return json.dumps(content, sort_keys=True).encode()


def _sampled_blocks(file: Path) -> Iterator[bytes]:
    """Yield all of a small file; of a large one the header and some blocks."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        if size <= WHOLE_BYTES:
            while block := stream.read(2**20):
                yield block
            return
        # A safetensors file begins with the size of its header: 8 bytes, little-endian.
        header_bytes = int.from_bytes(stream.read(8), "little") if file.suffix == ".safetensors" else BLOCK_BYTES
        yield stream.read(min(header_bytes, LARGEST_HEADER_BYTES))
        for number in range(BLOCKS):
            stream.seek(number * (size - BLOCK_BYTES) // (BLOCKS - 1))
            yield stream.read(BLOCK_BYTES)
