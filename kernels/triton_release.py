"""The installed version of triton, by which configs and workarounds are chosen."""

from __future__ import annotations

import triton

# Major and minor number: (3, 6) for "3.6.0+git1234".
RELEASE = tuple(int(part) for part in triton.__version__.split(".")[:2])
