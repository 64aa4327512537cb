"""Values of wrong types for every argument of the public functions that need no process group.

Each call gives a result, or an error of a promised kind that names the argument.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from functools import partial
from itertools import product
from typing import Any

import numpy
import pytest
import torch

from ring_attn import (
    ContextParallel,
    SequenceLayout,
    Strategy,
    balance,
    explain,
    next_rank,
    pack,
    select_backend,
    shard_batch,
)
from ring_attn.core.mask import Mask
from ring_attn.core.segments import Segment
from ring_attn.models.tensor_parallel import (
    LLAMA_TP_PLAN,
    TensorParallelConfig,
    shard_parameter,
    shard_state_dict,
)
from ring_attn.planning.devices import cpu_cluster
from tests.distributed.pool import ended

KINDS = (ValueError, TypeError, NotImplementedError)

WRONG: dict[str, object] = {
    "None": None,
    "True": True,
    "-1": -1,
    "2**64": 2**64,
    "1.5": 1.5,
    "nan": float("nan"),
    "inf": float("inf"),
    "text": "bogus",
    "bytes": b"x",
    "[]": [],
    "(1.5, 2)": (1.5, 2),
    "(None, None)": (None, None),
    "{}": {},
    "dict": {"a": 1},
    "object": object(),
    "type": int,
    "numpy": numpy.zeros(3),
    "scalar": torch.tensor(1.5),
    "vector": torch.zeros(3),
    "bool tensor": torch.zeros(1, 6, 4, 8, dtype=torch.bool),
    "complex": torch.zeros(1, 6, 4, 8, dtype=torch.complex64),
    "sparse": torch.zeros(1, 6, 4, 8).to_sparse(),
    "nested": torch.nested.nested_tensor([torch.zeros(6, 4, 8)], layout=torch.jagged),
    "layout of others": SequenceLayout.striped(7, 1),
}

ZIGZAG, RUNS = SequenceLayout.zigzag(12, 2), SequenceLayout.contiguous(12, 2)
CAUSAL = Mask(12, 12, causal=True, window_size=(2, 0))
CONFIGS = [TensorParallelConfig(rank, 2, 8, 16, num_heads=4, num_kv_heads=2) for rank in (0, 1)]
MODEL = {"a.q_proj.weight": torch.ones(8, 8), "norm": torch.ones(3)}
TOKENS = torch.arange(12)[None]
Q, KV = torch.ones(1, 6, 4, 8), torch.ones(1, 6, 2, 8)
OTHERWISE = {"plan": LLAMA_TP_PLAN, "otherwise": "replicated", "order": "out_in"}


def defaults(function: Callable[..., object]) -> dict[str, object]:
    """Maps each argument that has a default to its default."""
    parameters = inspect.signature(function).parameters
    return {name: p.default for name, p in parameters.items() if p.default is not p.empty}


def shard_tensors(**batch: Any) -> object:
    """Shards a batch given as keywords."""
    return shard_batch(batch, ZIGZAG, 1)


def one_segment(**numbers: Any) -> object:
    """Layout of a single segment."""
    return SequenceLayout.from_segments([[Segment(**numbers)]])


GOOD = [
    partial(select_backend, q=Q, k=KV, v=KV, backend="auto", softcap=0.0, sinks=None),
    partial(
        explain,
        **defaults(explain)
        | {
            "seqlen": 64,
            "world_size": 2,
            "nheads": 4,
            "nheads_kv": 2,
            "headdim": 8,
            "layout": "contiguous",
            "strategies": ["ring"],
            "cluster": cpu_cluster(2),
        },
    ),
    partial(next_rank, layout=ZIGZAG, block=256),
    partial(shard_batch, batch={"labels": TOKENS}, layout=ZIGZAG, rank=0, dim=1, ignore_index=-100),
    partial(shard_tensors, input_ids=TOKENS, labels=TOKENS),
    partial(Strategy, **defaults(Strategy)),
    partial(ContextParallel, **defaults(ContextParallel)),
    # -- layouts
    partial(SequenceLayout.contiguous, seqlen=8, world_size=2),
    partial(SequenceLayout.zigzag, seqlen=8, world_size=2),
    partial(SequenceLayout.boundaries, cuts=[0, 3, 8]),
    partial(SequenceLayout.from_segments, parts=[[Segment(0, 3)], [Segment(3, 3)]]),
    partial(one_segment, start=0, length=3, stride=1),
    partial(SequenceLayout, kind="boundaries", seqlen=8, world_size=2, cuts=(0, 3, 8), parts=None),
    partial(ZIGZAG.appended, rank=0, count=1),
    partial(ZIGZAG.followed_by, chunk=ZIGZAG),
    partial(ZIGZAG.segments, rank=0),
    partial(ZIGZAG.shard, x=torch.ones(1, 12, 3), rank=0, dim=1),
    partial(ZIGZAG.unshard, shards=[torch.ones(1, 6, 3)] * 2, dim=1),
    partial(ZIGZAG.mask_area, mask=CAUSAL),
    partial(pack, lengths=[9, 0, 3], world_size=2, **defaults(pack)),
    # -- balance
    partial(balance.balance_of, layout=ZIGZAG, work=CAUSAL),
    partial(balance.by_area, mask=CAUSAL, world_size=2, align=1),
    partial(balance.by_cost, cost=[1.0, 2.0, 3.0], world_size=2, align=1),
    partial(
        balance.by_separators,
        token_ids=TOKENS[0],
        separators=[3, 7],
        world_size=2,
    ),
    partial(
        balance.by_documents,
        cu_seqlens=[0, 4, 12],
        world_size=2,
        window_size=(-1, -1),
        max_balance=1.05,
    ),
    partial(balance.by_memory, seqlen=12, free_bytes=[100, 100], bytes_per_token=4),
    partial(balance.halo_rows, layout=RUNS, mask=CAUSAL, rank=0),
    partial(balance.check_halo, layout=RUNS, mask=CAUSAL),
    partial(balance.local_rows, layout=RUNS, rank=0, start=0, stop=3),
    # -- tensor parallelism
    partial(TensorParallelConfig, **vars(CONFIGS[0])),
    partial(shard_parameter, x=torch.ones(8, 8), kind="q", config=CONFIGS[0], order="out_in"),
    partial(shard_state_dict, state_dict=MODEL, config=CONFIGS[0], **OTHERWISE),
]

# Words of a message in place of an argument's name, where the value is valid by itself.
OTHER_WORDS = {
    "state_dict": "a must be a torch.Tensor",
    "work": "costs",
    "chunk": "layouts",
    "shards": "rank",
    "layout": "rows",
    "strategies": "strategy",
    "memory_bytes": "a rank has",
}

# Which of the wrong values an argument takes: they are valid, or left to the call that uses them.
TAKEN = {
    **dict.fromkeys(("nheads_kv", "headdim_v", "seqlen_k", "headdim", "degree"), ["None"]),
    **dict.fromkeys(("cu_seqlens", "cu_seqlens_k", "sinks", "parts"), ["None"]),
    **dict.fromkeys(("strategies", "cluster", "device_type", "heads_per_chunk"), ["None"]),
    **dict.fromkeys(("qkv_indices", "qkv_names"), ["None"]),
    **dict.fromkeys(("causal", "backward", "exchange_q", "exact"), ["True"]),
    **dict.fromkeys(("dim", "ignore_index"), ["-1"]),
    "max_rows": ["None", "2**64"],
    "output_index": ["None", "-1"],
    "replace": ["None", "{}", "type"],
    **dict.fromkeys(("strategy", "backend"), ["text"]),
    **dict.fromkeys(("batch", "state_dict", "plan"), ["{}"]),
    "shard_batch's batch": ["dict"],
    "softcap": ["1.5"],
    "same_bits": ["None", "True"],
    "layout": ["layout of others"],
    "memory_bytes": ["None", "2**64", "inf"],
    "max_balance": ["None", "2**64", "1.5"],
    "token_ids": ["[]", "{}"],
    "cost": ["[]", "(1.5, 2)", "{}", "numpy", "vector"],
}


def assert_named(
    call: partial[object],
    taken: Mapping[str, Collection[str]],
    other_words: Mapping[str, str],
    runs: Collection[object] = (None,),
) -> None:
    """Asserts that each wrong value is refused by its argument's name, or else taken.

    `runs` are the errors of a call that takes its arguments.
    """
    for argument, (what, wrong) in product(call.keywords, WRONG.items()):
        got = ended(partial(call, **{argument: wrong}))
        where = (call.func, argument, what, got)
        if got.error in runs:
            names = argument, f"{call.func.__name__}'s {argument}"
            assert any(what in taken.get(name, ()) for name in names), where
            continue
        words = argument, other_words.get(argument, argument)
        assert got.error in KINDS, where
        assert any(word in got.text for word in words) and got.alone, where


@pytest.mark.parametrize("call", GOOD, ids=lambda call: call.func.__qualname__)
def test_wrong_values_are_named(call: partial[object]) -> None:
    call()
    assert_named(call, TAKEN, OTHER_WORDS)
