"""An NCCL that is small enough to travel: of its device code, only one architecture's is kept."""

from __future__ import annotations

import struct

# The first version that permits several ranks on one GPU is 2.30.
VERSION = "2.30.7"

MAGIC = b"\x50\xed\x55\xba"  # a fat binary, in which CUDA's linker puts device code
HEADER = struct.Struct("<IHHQ")  # magic, version, bytes of the header, bytes of the entries
ENTRY = struct.Struct("<HHIQ")  # kind, version, bytes of the header, bytes of the code
ARCHITECTURE_AT = 28  # place of the architecture's number in an entry's header
PTX, MACHINE_CODE = 1, 2


def only_for(architecture: int, library: bytearray) -> int:
    """Overwrite all other device code with zeros, which compress to nothing; return bytes kept."""
    kept, at = 0, library.find(MAGIC)
    while at >= 0:
        _, version, header, size = HEADER.unpack_from(library, at)
        end = at + header + size
        if version != 1 or header != HEADER.size or end > len(library):
            end = at + len(MAGIC)  # only looks like one
        else:
            kept += _clear_entries(architecture, library, at + header, end)
        at = library.find(MAGIC, end)
    return kept


def _clear_entries(architecture: int, library: bytearray, at: int, end: int) -> int:
    """Clear the entries of one fat binary; return the bytes of those that are kept."""
    kept = 0
    while at < end:
        kind, _, header, size = ENTRY.unpack_from(library, at)
        (target,) = struct.unpack_from("<I", library, at + ARCHITECTURE_AT)
        if kind not in (PTX, MACHINE_CODE):
            break
        code = at + header
        if (kind, target) == (MACHINE_CODE, architecture):
            kept += size
        else:
            library[code : code + size] = bytes(size)
        at = code + size
    return kept
