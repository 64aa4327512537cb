"""The file of `ring-attn tune`, whose configs take the place of the frozen ones.

RING_ATTN_CONFIGS names it, one file for all ranks: the ranks of a group compare its hash when they
meet. Kinds and head dims that it does not name keep their frozen configs. It holds for the GPU
architecture and the version of triton with which its configs were checked.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import MISSING, asdict, fields, replace
from functools import cache
from typing import Any

import torch
import triton
from torch import Tensor

from . import configs
from .configs import Config

VARIABLE = "RING_ATTN_CONFIGS"

# Of the entries; another one is refused.
VERSION = 1

# The forward in Gluon, which takes the place of the kinds fwd and fwd_whole.
GLUON = "gluon"
KINDS = ("fwd", "fwd_whole", "dkdv", "dkdv_whole", "dq", "dq_whole", "decode", GLUON)

# The least and the greatest of each field of a config; blocks and warps are powers of 2.
BOUNDS = {
    "BLOCK_M": (16, 128),
    "BLOCK_N": (16, 128),
    "num_warps": (1, 16),
    "num_stages": (1, 8),
    "l2_bytes": (0, 1 << 40),
    "programs_per_sm": (0, 32),
}
POWERS = ("BLOCK_M", "BLOCK_N", "num_warps")

# By kind, of one bucket of head dims.
Chosen = Mapping[str, Config]


def select(kind: str, x: Tensor, headdim_v: int) -> Config:
    """The config of a kernel: the file's where there is one, else the frozen one."""
    return _chosen(x, headdim_v).get(kind) or configs.select(kind, x, headdim_v)


def takes_gluon(x: Tensor, headdim_v: int) -> bool:
    """Whether calls have the forward in Gluon: not where a file has configs of the portable one."""
    chosen = _chosen(x, headdim_v)
    portable = GLUON not in chosen and not {"fwd", "fwd_whole"}.isdisjoint(chosen)
    return not portable and configs.takes_gluon(x, headdim_v)


def section(
    device: torch.device, headdim: int, dtype: torch.dtype, chosen: Chosen
) -> dict[str, Any]:
    """The part of a file that `check_file` reads, as JSON has it; float32 stays frozen on GPUs."""
    taken = {} if _stays_frozen(device, dtype) else chosen
    return {
        "version": VERSION,
        "architecture": architecture(device),
        "triton": triton.__version__,
        "table": [
            {"kind": kind, "headdim": configs.bucket(headdim), **asdict(replace(config, note=""))}
            for kind, config in taken.items()
        ],
    }


def takes_gluon_bwd(x: Tensor, headdim_v: int, softcap: float) -> bool:
    """Whether calls have the backward in Gluon, likewise."""
    portable = configs.name_backward(_chosen(x, headdim_v))
    return not portable and configs.takes_gluon_bwd(x, headdim_v, softcap)


def check_file(device: torch.device) -> None:
    """Refuses a file that RING_ATTN_CONFIGS names and that is not for this device.

    Raises:
        ValueError: a file that cannot be read, is none of `ring-attn tune`, is of another version
            or architecture, or has configs that no kernel takes; or RING_ATTN_AUTOTUNE=1 beside it.
    """
    path = os.environ.get(VARIABLE)
    if not path:
        return
    if configs.autotune_enabled():
        raise ValueError(
            f"RING_ATTN_AUTOTUNE=1 searches what {VARIABLE}={path} has found, got both: unset one"
        )
    _read(path, architecture(device))


@cache
def architecture(device: torch.device) -> str:
    """The architecture that a file is for: finer than a column of the frozen table."""
    found = configs.architecture(device)
    if found in ("interpreter", "gfx942"):
        return found
    return "sm_{}{}".format(*torch.cuda.get_device_capability(device))


def _chosen(x: Tensor, headdim_v: int) -> Chosen:
    path = os.environ.get(VARIABLE)
    if not path or _stays_frozen(x.device, x.dtype):
        return {}
    bucket = configs.bucket(max(x.size(-1), headdim_v))
    return _read(path, architecture(x.device)).get(bucket, {})


def _stays_frozen(device: torch.device, dtype: torch.dtype) -> bool:
    return device.type != "cpu" and dtype == torch.float32


@cache
def _read(path: str, arch: str) -> Mapping[int, Chosen]:
    """The configs of a file, by bucket of head dims; once in a process."""
    try:
        with open(path, encoding="utf-8") as file:
            report = json.load(file)
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{VARIABLE}={path} cannot be read: {error}; {_AGAIN}") from error
    found = report.get("configs") if isinstance(report, dict) else None
    if not isinstance(found, dict) or not isinstance(found.get("table"), list):
        raise ValueError(f"{VARIABLE}={path} is no file of ring-attn tune; {_AGAIN}")
    wanted = {"version": VERSION, "architecture": arch, "triton": triton.__version__}
    for name, here in wanted.items():
        if found.get(name) != here:
            raise ValueError(
                f"{VARIABLE}={path} is for another {name}, {found.get(name)!r}, here it is "
                f"{here!r}; {_AGAIN}"
            )
    table: dict[int, dict[str, Config]] = {}
    for entry in found["table"]:
        try:
            kind, headdim, config = _entry(entry)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"{VARIABLE}={path} has a broken entry, {entry}: {error!r}; {_AGAIN}"
            ) from error
        table.setdefault(headdim, {})[kind] = config
    for headdim, chosen in table.items():
        _check_folds(path, arch, headdim, chosen)
    return table


_AGAIN = "run ring-attn tune on this GPU, or unset it for the frozen configs"


def _entry(entry: Any) -> tuple[str, int, Config]:
    """Kind, head dim and config of an entry; any error where it is none."""
    values = dict(entry)
    kind, headdim = values.pop("kind"), values.pop("headdim")
    if kind not in KINDS or headdim not in configs.BUCKETS:
        raise ValueError(f"kind must be of {KINDS} and headdim of {configs.BUCKETS}")
    if kind == GLUON:
        known = [replace(config, note="") for config in configs.GLUON[headdim]]
        given = [config for config in known if asdict(config) == {**values, "note": ""}]
        if not given:
            raise ValueError(f"gluon has the configs {known}")
        return kind, headdim, given[0]
    for field in fields(Config):
        if field.name == "note" or (field.default is not MISSING and field.name not in values):
            continue
        value, (least, most) = values[field.name], BOUNDS[field.name]
        if type(value) is not int or not least <= value <= most:
            raise ValueError(f"{field.name} must be an int from {least} to {most}")
        if field.name in POWERS and value & (value - 1):
            raise ValueError(f"{field.name} must be a power of 2")
    if values.get("programs_per_sm") and kind != GLUON:
        raise ValueError(f"programs_per_sm is of kind {GLUON}")
    return kind, headdim, Config(**{**values, "note": ""})


def _check_folds(path: str, arch: str, headdim: int, chosen: Chosen) -> None:
    """Refuses two kinds of a kernel that fold blocks of two lengths: see `configs.FOLDED`."""
    column = configs.column(arch)
    for kernel, block in configs.FOLDED.items():
        lengths = {
            kind: getattr(
                chosen.get(kind) or configs.frozen(kind, column, headdim, torch.float16), block
            )
            for kind in (kernel, f"{kernel}_whole")
        }
        if len(set(lengths.values())) > 1:
            raise ValueError(
                f"{VARIABLE}={path} has kinds of head dim {headdim} that fold blocks of several "
                f"lengths, {lengths}: a ring would not have the bits of one rank; {_AGAIN}"
            )
