"""Messages: tensors side by side in one buffer, aligned, and none in another's bytes."""

from math import prod

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ring_attn.core.spec import AttentionSpec, Packet

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.uint8)

reproducible = settings(deadline=None, derandomize=True, max_examples=100)

packets = st.lists(
    st.tuples(
        st.lists(st.integers(0, 5), min_size=0, max_size=4).map(tuple), st.sampled_from(DTYPES)
    ),
    min_size=1,
    max_size=5,
).map(lambda parts: Packet(tuple(p[0] for p in parts), tuple(p[1] for p in parts)))


@reproducible
@given(packets, st.integers(0, 40))
def test_what_is_written_is_read_back(packet: Packet, spare: int) -> None:
    """Tensors are aligned, with no more between them than that takes, and none is in another's."""
    sizes = map(prod, packet.shapes)
    ends = [
        a + n * d.itemsize for a, n, d in zip(packet.offsets, sizes, packet.dtypes, strict=False)
    ]
    assert all(
        0 <= b - a < 16 for a, b in zip([0, *ends], packet.offsets[: len(ends)], strict=False)
    )
    assert packet.nbytes == max(16, packet.offsets[-1]) >= max(ends)
    assert all(at % 16 == 0 for at in (*packet.offsets, packet.nbytes))
    buffer = torch.full((packet.nbytes + spare,), 0xFF, dtype=torch.uint8)
    views = packet.views(buffer)
    values = [
        torch.randint(0, 100, shape).to(dtype)
        for shape, dtype in zip(packet.shapes, packet.dtypes, strict=True)
    ]
    for view, value in zip(views, values, strict=True):
        assert (view.shape, view.dtype) == (value.shape, value.dtype)
        assert view.is_contiguous()
        view.copy_(value)
    # As a message: only nbytes arrive, in another buffer.
    received = torch.zeros(packet.nbytes, dtype=torch.uint8)
    received.copy_(buffer[: packet.nbytes])
    for view, value in zip(packet.views(received), values, strict=True):
        assert torch.equal(view, value)
    written = {i for a, end in zip(packet.offsets, ends, strict=False) for i in range(a, end)}
    rest = [byte for byte in range(len(buffer)) if byte not in written]
    assert bool((buffer[rest] == 0xFF).all()), "bytes outside the tensors were written"


@pytest.mark.parametrize(
    ("dtype", "accum"),
    [
        (torch.float16, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ],
    ids=str,
)
def test_packets_of_a_call(dtype: torch.dtype, accum: torch.dtype) -> None:
    spec = AttentionSpec("cpu", dtype, batch=2, nheads=6, nheads_kv=3, headdim=8, headdim_v=5)
    assert spec.accum_dtype == accum
    k, v, q, dout, lse = (2, 7, 3, 8), (2, 7, 3, 5), (2, 7, 6, 8), (2, 7, 6, 5), (2, 6, 7)
    for packet, expected in (
        (spec.kv_packet(7), [(k, dtype), (v, dtype)]),
        (spec.kv_grad_packet(7), [(k, accum), (v, accum)]),
        (spec.q_packet(7), [(q, dtype), (dout, dtype), (lse, accum), (lse, accum)]),
        (spec.q_grad_packet(7), [(q, accum)]),
    ):
        size = sum(-(-prod(shape) * one.itemsize // 16) * 16 for shape, one in expected)
        assert packet.nbytes == size
        views = packet.views(torch.zeros(packet.nbytes, dtype=torch.uint8))
        assert [(tuple(view.shape), view.dtype) for view in views] == expected
