"""The call as one value: its text, and the types of its options."""

import inspect
import json
from collections.abc import Callable
from typing import Any

import numpy
import pytest

from ring_attn import Strategy, TransportOptions, check, ring_attention, tree_decode
from ring_attn.call import AttentionOptions, DecodeOptions, How, Request, SdpaOptions, What

PLAIN = Request(
    causal=False,
    window_size=(-1, -1),
    softmax_scale=None,
    softcap=0.0,
    group="0",
    backend="auto",
    transport=TransportOptions(),
)
CALLS = [
    PLAIN,
    PLAIN._replace(layout="zigzag", strategy="ulysses", same_bits=True, differentiated=True),
    PLAIN._replace(strategy=Strategy("all_gather", 2, heads_per_chunk=3), mesh_shape=(4, 2)),
    PLAIN._replace(
        softmax_scale=0.1 + 0.2, softcap=2.0**-63, window_size=(2**63 - 1, 0), causal=True
    ),
    PLAIN._replace(group='a "group"\n\u00e9', transport=TransportOptions(1e-3, 4)),
]


@pytest.mark.parametrize("call", CALLS)
def test_text_says_everything(call: Request) -> None:
    """The text is JSON, since one process stores a graph and another process loads it."""
    assert set(json.loads(call.text)) == set(call._fields)
    again = Request.from_text(call.text)
    assert again == call
    assert hash(again) == hash(call)
    assert [type(x) for x in again] == [type(x) for x in call]


def test_numbers_of_numpy_are_numbers() -> None:
    scale, window = numpy.float32(0.5), (numpy.int64(3), numpy.int32(2))
    call = PLAIN._replace(
        softmax_scale=check.check_scale(scale),
        softcap=check.check_softcap(numpy.int64(2)),
        window_size=check.check_window(window, True),
        transport=check.check_transport(TransportOptions(numpy.float32(2.5))),
    )
    check.check_unsupported(numpy.float64(0), None)
    transport = TransportOptions(2.5)
    expected = PLAIN._replace(
        softmax_scale=0.5, softcap=2.0, window_size=(3, 0), transport=transport
    )
    assert Request.from_text(call.text) == expected


@pytest.mark.parametrize(
    ("function", "options"), [(ring_attention, AttentionOptions), (tree_decode, DecodeOptions)]
)
def test_every_option_of_the_signature_has_its_type(
    function: Callable[..., Any], options: type
) -> None:
    parameters = inspect.signature(function).parameters.values()
    given = {p.name for p in parameters if p.kind is p.KEYWORD_ONLY}
    assert given - {"return_lse", "return_max_logits"} == set(options.__annotations__)


def test_what_and_how_share_no_option() -> None:
    what, how = set(What.__annotations__), set(How.__annotations__)
    assert not what & how
    refused = {"dropout_p", "alibi_slopes"}
    assert what | how | refused == set(AttentionOptions.__annotations__)
    assert what - set(SdpaOptions.__annotations__) == {"causal", "softmax_scale"}
