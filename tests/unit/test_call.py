"""The options of a call as one value, and their text."""

import json
import subprocess
import sys
from dataclasses import fields, replace
from inspect import signature
from pathlib import Path
from typing import Any

import numpy
import pytest

from ring_attn import Strategy, TransportOptions
from ring_attn.call import Options, checked_options
from ring_attn.core.strategy import resolve_strategy

PLAIN: dict[str, Any] = {
    "causal": False,
    "left": -1,
    "right": -1,
    "softmax_scale": None,
    "softcap": 0.0,
    "group": "0",
    "backend": "auto",
    "transport": TransportOptions(),
}
NAMED: dict[str, Any] = {
    "causal": True,
    "left": 2**63 - 1,
    "right": 0,
    "softmax_scale": 0.1 + 0.2,
    "softcap": 2.0**-63,
    "group": 'a "group"\n\u00e9',
    "backend": "reference",
    "transport": TransportOptions(1e-3),
    "layout": "zigzag",
    "strategy": "ulysses",
    "same_bits": True,
    "differentiated": True,
    "max_logits": True,
    "mesh_shape": (4, 2),
}


def of(**options: Any) -> Options:
    return checked_options(**PLAIN | options)


def test_text_says_everything() -> None:
    """The text is JSON, since one process stores a graph and another process loads it."""
    options = checked_options(**NAMED)
    json.loads(options.text)
    read = Options.from_text(options.text)
    assert read == options
    values = dict(NAMED)
    window = values.pop("left"), values.pop("right")
    expected = values | {"window_size": window}
    assert {*expected} == {field.name for field in fields(Options)}
    for name, value in expected.items():
        found = getattr(read, name)
        assert found == value and type(found) is type(value), name


def test_a_strategy_survives_the_text_and_has_its_degrees_of_the_mesh() -> None:
    given = Strategy("all_gather", 2, heads_per_chunk=3)
    options = Options.from_text(of(strategy=given, mesh_shape=(4, 2)).text)
    assert resolve_strategy(options.strategy, 8, options.mesh_shape) == given
    named = Options.from_text(of(strategy="hybrid", mesh_shape=(4, 2)).text)
    found = resolve_strategy(named.strategy, 8, named.mesh_shape)
    assert found == Strategy(ulysses_degree=2)


def test_every_option_is_a_field_and_is_checked() -> None:
    taken = {*signature(checked_options).parameters} - {"left", "right"} | {"window_size"}
    assert taken == {field.name for field in fields(Options)}


@pytest.mark.parametrize("option", ["causal", "left", "softmax_scale", "same_bits"])
def test_options_are_not_cached_for_a_value_of_another_type(option: str) -> None:
    """True equals 1 and hashes as it does, and only one of them is right."""
    good, bad = (True, 1) if option in ("causal", "same_bits") else (1, True)
    of(**{option: good})
    with pytest.raises(TypeError):
        of(**{option: bad})


def test_numbers_of_numpy_are_numbers() -> None:
    options = of(
        softmax_scale=numpy.float32(0.5),
        softcap=numpy.int64(2),
        left=numpy.int64(3),
        right=numpy.int32(2),
        causal=True,
        transport=TransportOptions(numpy.float32(2.5)),
    )
    expected = of(softmax_scale=0.5, softcap=2.0, left=3, right=0, causal=True)
    read = Options.from_text(options.text)
    assert read == replace(expected, transport=TransportOptions(2.5))
    assert type(read.softmax_scale) is float and type(read.transport.timeout) is float


EXPORTED = """
import sys, torch, torch.distributed as dist, ring_attn

class Attention(torch.nn.Module):
    def forward(self, q, k, v):
        options = {"causal": True, "softmax_scale": 0.3, "strategy": "all_gather"}
        return ring_attn.ring_attention(q, k, v, **options)

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
torch.manual_seed(0)
tensors = tuple(torch.randn(1, 16, 2, 8) for _ in range(3))
if sys.argv[2] == "store":
    torch.export.save(torch.export.export(Attention(), tensors), sys.argv[1])
else:
    loaded = torch.export.load(sys.argv[1]).module()
    assert torch.equal(loaded(*tensors), Attention()(*tensors))
"""


@pytest.mark.slow
def test_one_process_stores_a_graph_and_another_loads_it(tmp_path: Path) -> None:
    for what in ("store", "load"):
        command = [sys.executable, "-c", EXPORTED, str(tmp_path / "graph.pt2"), what]
        ran = subprocess.run(command, capture_output=True, text=True, timeout=600)
        assert ran.returncode == 0, ran.stderr
