"""Records what a change of structure must not change: `python -m tests.record before.json`.

Hashes of results and gradients, programs, predicted and sent bytes, peaks of memory, and plans. A
second file name compares: `python -m tests.record after.json before.json`. Kept only for issue 32.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

import torch

from ring_attn.core.mask import Mask
from ring_attn.core.masks import chunked
from ring_attn.core.spec import AttentionSpec
from ring_attn.machines.count import bytes_sent, peak_bytes
from ring_attn.planning import planner
from ring_attn.planning.candidates import layouts_of
from ring_attn.planning.choice import Problem
from ring_attn.planning.devices import builtin_cluster, with_backend
from ring_attn.strategies.registry import both_programs, program_of
from ring_attn.testing import Case, run_all_ranks
from tests.unit.test_programs import calls_of

MASKS = {
    "full": Mask(192, 192),
    "causal": Mask(192, 192, causal=True),
    "window": Mask(192, 192, True, (40, 0)),
    "chunked": chunked(192, 50),
    "documents": Mask(192, 192, True, (-1, -1), (0, 60, 65, 165, 192), (0, 60, 65, 165, 192)),
}


def digest(value: object) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()[:16]


def programs() -> dict[str, object]:
    found: dict[str, object] = {}
    for world_size in (1, 2, 3, 4, 6):
        spec = AttentionSpec("cuda", torch.bfloat16, 1, 8, 4, 64, 64)
        for strategy in planner.strategies_of(problem(spec, MASKS["full"], world_size), None):
            for name, mask in MASKS.items():
                for layout in ("contiguous", "zigzag", "striped"):
                    for call in calls_of(strategy, mask, layout, world_size):
                        for backward in (False, True):
                            key = f"{strategy} {name} {layout} {call.rank}/{world_size} {backward}"
                            program = program_of(call, backward=backward)
                            found[key] = (
                                digest(program.ops), str(bytes_sent(program)),
                                len([*program.posts()]),
                                peak_bytes(both_programs(call, backward=backward), call),
                            )  # fmt: skip
    return found


def problem(spec: AttentionSpec, mask: Mask, world_size: int, device: str = "H100") -> Problem:
    cluster = with_backend(builtin_cluster(device), "triton", spec)
    return Problem(spec, mask, world_size, cluster, "triton")


def plans() -> dict[str, object]:
    found: dict[str, object] = {}
    for world_size in (1, 2, 3, 8, 16):
        for heads in (8, 1):
            for causal in (True, False):
                rows = 4096 * world_size
                spec = AttentionSpec("cuda", torch.bfloat16, 1, 32, heads, 128, 128)
                asked = problem(spec, Mask(rows, rows, causal), world_size)
                choice = planner.choose(asked, layouts_of(asked, "auto"), effort="all")
                found[f"{world_size} {heads} {causal}"] = digest(json.dumps(choice.to_dict()))
                for c in choice.candidates:
                    key = f"{world_size} {heads} {causal} {c.label} {c.layout_name}"
                    found[key] = c.seconds, c.peak_bytes, c.at_least, c.reason
    return found


def results() -> dict[str, object]:
    found: dict[str, object] = {}
    for mask in ("causal", "window", "documents", "longer kv", "empty rows"):
        for strategy in ("ring", "all_gather", "exchange", "ulysses", "q_exchange"):
            layout = "contiguous" if strategy == "q_exchange" else "zigzag"
            case = Case(mask, layout, strategy, "reference", "float32", seqlen=61, batch=1)
            ran = run_all_ranks(case, 4)
            tensors = ((name, x) for name, x in vars(ran.whole).items() if torch.is_tensor(x))
            found[f"{mask} {strategy}"] = {name: digest(x.tolist()) for name, x in tensors}
    return found


def main(path: str, before: str | None = None) -> int:
    now = {"programs": programs(), "plans": plans(), "results": results()}
    text = json.dumps(now, indent=0, default=str)
    Path(path).write_text(text)
    if before is None:
        return 0
    old, new = json.loads(Path(before).read_text()), json.loads(text)
    differ = [
        f"{part}: {key}: {old[part].get(key)} -> {new[part].get(key)}"
        for part in old
        for key in {**old[part], **new[part]}
        if old[part].get(key) != new[part].get(key)
    ]
    print("\n".join([*differ[:40], f"{len(differ)} differences, {sum(map(len, new.values()))}"]))
    return min(len(differ), 1)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
