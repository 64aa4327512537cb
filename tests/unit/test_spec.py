"""Messages: tensors side by side in one buffer, aligned and without overlap."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ring_attn.core.spec import ALIGNMENT, AttentionSpec, Packet

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.uint8)

packets = st.lists(
    st.tuples(
        st.lists(st.integers(0, 5), min_size=0, max_size=4).map(tuple), st.sampled_from(DTYPES)
    ),
    min_size=1,
    max_size=5,
).map(lambda parts: Packet(tuple(p[0] for p in parts), tuple(p[1] for p in parts)))


@settings(deadline=None, derandomize=True, max_examples=100)
@given(packets, st.integers(0, 40))
def test_what_is_written_is_read_back(packet: Packet, spare: int) -> None:
    """Tensors are aligned with the least padding; no message has zero bytes."""
    buffer = torch.zeros(packet.nbytes + spare, dtype=torch.uint8)
    values = [
        torch.randint(1, 100, shape).to(dtype)
        for shape, dtype in zip(packet.shapes, packet.dtypes, strict=True)
    ]
    for view, value in zip(packet.views(buffer), values, strict=True):
        assert (view.shape, view.dtype) == (value.shape, value.dtype)
        assert view.is_contiguous()
        view.copy_(value)
    # Like a message, only nbytes arrive, in another buffer.
    received = buffer[: packet.nbytes].clone()
    assert all(map(torch.equal, packet.views(received), values))
    assert all(offset % ALIGNMENT == 0 for offset in packet.offsets)
    sizes = [-(-value.nbytes // ALIGNMENT) * ALIGNMENT for value in values]
    assert packet.nbytes == max(sum(sizes), ALIGNMENT)


@pytest.mark.parametrize("rows", [0, 7])
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
def test_packets_of_a_call(dtype: torch.dtype, accum: torch.dtype, rows: int) -> None:
    spec = AttentionSpec("cpu", dtype, batch=2, nheads=6, nheads_kv=3, headdim=8, headdim_v=5)
    assert spec.accum_dtype == accum
    k, v, q, dout = ((2, rows, *sizes) for sizes in ((3, 8), (3, 5), (6, 8), (6, 5)))
    lse = (2, 6, rows)
    for packet, expected in (
        (spec.kv_packet(rows), [(k, dtype), (v, dtype)]),
        (spec.kv_grad_packet(rows), [(k, accum), (v, accum)]),
        (spec.q_packet(rows), [(q, dtype), (dout, dtype), (lse, accum), (lse, accum)]),
        (spec.q_grad_packet(rows), [(q, accum)]),
    ):
        views = packet.views(torch.zeros(packet.nbytes, dtype=torch.uint8))
        assert [(tuple(view.shape), view.dtype) for view in views] == expected
