"""The file of configs for the kernels, which must be the same on all ranks."""

from __future__ import annotations

import hashlib
import os

from ring_attn.values.outside import regular_file

CONFIGS_VARIABLE = "RING_ATTN_CONFIGS"


def hash_of_configs() -> str:
    path = os.environ.get(CONFIGS_VARIABLE)
    if not path:
        return "none"
    try:
        return hashlib.sha256(regular_file(path).read_bytes()).hexdigest()[:16]
    except OSError as error:
        # Not raised here: the other ranks would wait for this rank.
        return f"unreadable ({error.strerror})"
    except ValueError:
        return "no regular file"
