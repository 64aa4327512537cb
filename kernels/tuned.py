"""The file of `ring-attn tune`, whose configs replace the frozen ones.

RING_ATTN_CONFIGS names the file, which must be the same for all ranks: the ranks of a group compare
its hash when they meet. Kinds and head dims not in the file keep their frozen configs. The file is
valid for the GPU architecture and the version of triton with which it was made.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict
from functools import cache
from typing import Any

import torch
import triton
from torch import Tensor

from . import configs
from .configs import Config, exact_architecture
from .gluon_guard import gluon_missing

VARIABLE = "RING_ATTN_CONFIGS"

# Version of the file's format; other versions are refused.
VERSION = 1

# The forward in Gluon, which replaces the kinds fwd and fwd_whole.
GLUON = "gluon"
KINDS = ("fwd", "fwd_whole", "dkdv", "dkdv_whole", "dq", "dq_whole", "decode", GLUON)

# Kind -> config, for one bucket of head dims.
Chosen = Mapping[str, Config]
NONE: Chosen = {}

# Kind -> the portable kernels that it replaces.
PORTABLE = {GLUON: {"fwd"}, "one_pass": {"dq", "dkdv"}}


def select(kind: str, x: Tensor, headdim_v: int) -> Config:
    """The config of a kernel: from the file if it has one, else the frozen one."""
    return _chosen(x, headdim_v).get(kind) or configs.select(kind, x, headdim_v)


def takes_gluon(x: Tensor, headdim_v: int, own: Chosen = NONE) -> bool:
    """Tells whether the forward is the kernel in Gluon.

    It is not if `own` or the file configures the portable kernel. The answer is the same at every
    step, on every rank and at every world size: the two kernels may fold blocks of different
    lengths, and a call that mixed them would have other bits.

    Raises:
        NotImplementedError: `own` configures a kernel that does not take these tensors.
    """
    arch = configs.architecture(x.device)
    able = arch in ("sm_90", "sm_100") and gluon_missing(arch) is None and _half(x)
    able = able and {x.size(-1), headdim_v} <= configs.in_gluon(arch).keys()
    return _unless_configured(GLUON, able, x, headdim_v, own)


def takes_one_pass(x: Tensor, headdim_v: int, softcap: float = 0.0, own: Chosen = NONE) -> bool:
    """Tells whether one kernel computes dq, dk and dv; as `takes_gluon`.

    It takes no softcap, which would need more registers than there are. In the interpreter it is
    used if `own` configures it.
    """
    arch, alike = configs.architecture(x.device), x.size(-1) == headdim_v
    if arch == "interpreter":
        able = alike and "one_pass" in own
    else:
        able = alike and headdim_v in configs.ONE_PASS.get(arch, {}) and _half(x)
        able = able and gluon_missing(arch) is None
    return _unless_configured("one_pass", able and not softcap, x, headdim_v, own)


def _half(x: Tensor) -> bool:
    return x.dtype in (torch.float16, torch.bfloat16)


def _unless_configured(kind: str, able: bool, x: Tensor, headdim_v: int, own: Chosen) -> bool:
    """`able`, unless `own` or the file configures a kernel that this kind replaces."""
    if kind in own and not able:
        raise NotImplementedError(f"the kernel {kind!r} does not take these tensors")
    for chosen in (own, _chosen(x, headdim_v)):
        if kind in chosen:
            return able
        if not PORTABLE[kind].isdisjoint(other.partition("_")[0] for other in chosen):
            return False
    return able


def section(
    device: torch.device, headdim: int, dtype: torch.dtype, chosen: Chosen
) -> dict[str, Any]:
    """The part of the file that `check_file` reads, as JSON; on GPUs float32 stays frozen."""
    entries = {} if stays_frozen(device, dtype) else chosen
    return {
        "version": VERSION,
        "architecture": exact_architecture(device),
        "triton": triton.__version__,
        "table": [
            {"kind": kind, "headdim": configs.bucket(headdim), **asdict(config)}
            for kind, config in entries.items()
        ],
    }


def check_file(device: torch.device) -> None:
    """Refuses the file of RING_ATTN_CONFIGS if it is not valid for this device.

    Raises:
        ValueError: the file cannot be read, is not from `ring-attn tune`, is for another version or
            architecture, or has invalid configs.
    """
    path = os.environ.get(VARIABLE)
    if not path:
        return
    _read(path, exact_architecture(device))


def _chosen(x: Tensor, headdim_v: int) -> Chosen:
    path = os.environ.get(VARIABLE)
    if not path or stays_frozen(x.device, x.dtype):
        return {}
    bucket = configs.bucket(max(x.size(-1), headdim_v))
    return _read(path, exact_architecture(x.device)).get(bucket, {})


def stays_frozen(device: torch.device, dtype: torch.dtype) -> bool:
    return device.type != "cpu" and dtype == torch.float32


@cache
def _read(path: str, arch: str) -> Mapping[int, Chosen]:
    """The configs of a file, by bucket of head dims; read once per process."""
    try:
        with open(path, encoding="utf-8") as file:
            report = json.load(file)
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{VARIABLE}={path} cannot be read: {error}; {_AGAIN}") from error
    content = report.get("configs") if isinstance(report, dict) else None
    if not isinstance(content, dict) or not isinstance(content.get("table"), list):
        raise ValueError(f"{VARIABLE}={path} is no file of ring-attn tune; {_AGAIN}")
    needed = {"version": VERSION, "architecture": arch, "triton": triton.__version__}
    for name, here in needed.items():
        if content.get(name) != here:
            raise ValueError(
                f"{VARIABLE}={path} is for another {name}, {content.get(name)!r}, here it is "
                f"{here!r}; {_AGAIN}"
            )
    table: dict[int, dict[str, Config]] = {}
    for entry in content["table"]:
        try:
            kind, headdim, config = _entry(entry, arch)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"{VARIABLE}={path} has a broken entry, {entry}: {error!r}; {_AGAIN}"
            ) from error
        table.setdefault(headdim, {})[kind] = config
    for headdim, chosen in table.items():
        _check_folds(path, arch, headdim, chosen)
    return table


_AGAIN = "run ring-attn tune on this GPU, or unset it for the frozen configs"


def _entry(entry: Any, arch: str) -> tuple[str, int, Config]:
    """Kind, head dim and config of an entry; raises errors of any kind if it is invalid."""
    values = dict(entry)
    kind, headdim = values.pop("kind"), values.pop("headdim")
    if kind not in KINDS or headdim not in configs.BUCKETS:
        raise ValueError(f"kind must be of {KINDS} and headdim of {configs.BUCKETS}")
    known = configs.search_space(kind, configs.column(arch), headdim, torch.float16)
    config = Config(**values)
    for name, value in asdict(config).items():
        tried = sorted({getattr(other, name) for other in known})
        if value not in tried:
            raise ValueError(f"{name} must be of {tried}")
    if config not in known:
        raise ValueError(f"{kind} has the configs {known}")
    return kind, headdim, known[known.index(config)]


def _check_folds(path: str, arch: str, headdim: int, chosen: Chosen) -> None:
    """Refuses a file whose kinds of one kernel fold blocks of different lengths: see `FOLDED`."""
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
