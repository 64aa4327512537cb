"""CUDA graphs on the deferred device: what a capture records, and its replays.

Rules of CUDA and of torch's documentation: captured work runs only at replays, each of which begins
after the work of its stream and ends as a whole; the graph's streams are joined at the end; nothing
else is queued, no event queried and no memory pinned meanwhile. As `torch.cuda.graph` does, a
capture begins once the device has done all that was queued. Memory allocated within a capture is
the graph's as long as it lives.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from tests.deferred.cuda import Capture, CaptureError
from tests.deferred.device import Node, Recorder


class Graph:
    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._nodes: list[Node] = []

    @contextmanager
    def capture(self) -> Iterator[None]:
        """Records the block's work on the current stream, and on those that wait for it."""
        recorder, cuda = self._recorder, self._recorder.cuda
        recorder.end(_last(node for node in recorder.nodes if node.stream is not None))
        cuda.capture = capture = Capture(len(recorder.nodes))
        home = cuda.home
        capture.join(home)
        try:
            yield
            self._nodes = recorder.nodes[capture.first :]
            joined, waits = set(self._nodes), [*home.tail]
            while waits:
                if (node := waits.pop()) in joined:
                    joined.remove(node)
                    waits += node.after
            left = [node.what for node in joined if node.stream is not None]
            if left:
                raise CaptureError(f"the capture's stream has not waited for {left}")
        finally:
            cuda.capture = None
            del recorder.nodes[capture.first :]
            for queue, tail in capture.before.items():
                queue.tail = tail

    def replay(self) -> None:
        """Queues the graph's work on the current stream."""
        recorder, home = self._recorder, self._recorder.cuda.home
        copies: dict[Node, Node] = {}
        for node in self._nodes:
            after = tuple(copies.get(one, one) for one in node.after)
            copies[node] = replace(node, after=(*after, *home.tail))
        recorder.nodes += copies.values()
        # The next users of the graph's memory are parts of it, too.
        home.tail = tuple(_last(copies.values()))


def _last(nodes: Iterable[Node]) -> list[Node]:
    """The nodes that no other one waits for."""
    nodes = list(nodes)
    before = {one for node in nodes for one in node.after}
    return [node for node in nodes if node not in before]
