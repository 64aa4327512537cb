"""The call as one value, and its text."""

import json

import numpy
import pytest

from ring_attn import Strategy, TransportOptions, groups, refusals
from ring_attn.call import Request

PLAIN = Request(
    causal=False,
    window_size=(-1, -1),
    softmax_scale=None,
    softcap=0.0,
    group="0",
    backend="auto",
    transport=TransportOptions(),
)
NAMED = PLAIN._replace(
    softmax_scale=0.1 + 0.2, softcap=2.0**-63, window_size=(2**63 - 1, 0), causal=True,
    layout="zigzag", strategy="ulysses", same_bits=True, differentiated=True,
    group='a "group"\n\u00e9', transport=TransportOptions(1e-3, 4),
)  # fmt: skip
VALUE = PLAIN._replace(strategy=Strategy("all_gather", 2, heads_per_chunk=3), mesh_shape=(4, 2))


@pytest.mark.parametrize("call", [PLAIN, NAMED, VALUE])
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
        softmax_scale=refusals.check_scale(scale),
        softcap=refusals.check_softcap(numpy.int64(2)),
        window_size=refusals.check_window(window, True),
        transport=groups.check_transport(TransportOptions(numpy.float32(2.5))),
    )
    refusals.check_unsupported(numpy.float64(0), None)
    transport = TransportOptions(2.5)
    expected = PLAIN._replace(
        softmax_scale=0.5, softcap=2.0, window_size=(3, 0), transport=transport
    )
    assert Request.from_text(call.text) == expected
