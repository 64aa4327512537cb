"""Messages and records: tensors side by side in one buffer, aligned and without overlap."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ring_attn.core.messages import ALIGNMENT, Packet, Records

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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_records_of_several_messages_are_tensors_that_kernels_load(dtype: torch.dtype) -> None:
    """A view has all messages' rows; its heads begin at multiples of 16 bytes."""
    dims = (5, 8, None, 1, None, 3)
    records = Records(2, 5, 3, tuple((dim, dtype if dim else torch.float32) for dim in dims))
    views = records.views(torch.zeros(3 * records.nbytes, dtype=torch.uint8))
    for view, dim in zip(views, dims, strict=True):
        assert view.shape == ((2, 15, 3, dim) if dim else (2, 3, 15))
        aligned = (view.storage_offset(), *view.stride()[:-1])
        assert not dim or all(number * view.element_size() % 16 == 0 for number in aligned)
