"""Attention over a split sequence by other packages, each with the arguments of its documentation.

The ring template of torch and ring-attention-pytorch run on CPUs. No GPU has run the calls of the
others yet: they follow the README files and tests of the packages.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ring_attn.bench.peers import installed
from ring_attn.bench.ring_implementations import Attend, Dense, RingCase, RingImpl
from ring_attn.core.layout import SequenceLayout
from ring_attn.testing.launch import rank_device


class Peer(RingImpl):
    """Another package.

    Attributes:
        package: the module that must be installed; None is torch.
        project: what pip installs.
        on_cpu: whether it runs on CPUs.
        kinds: kinds of masks that it has.
    """

    package: str | None = None
    project = ""
    on_cpu = False
    kinds: tuple[str, ...] = ("causal", "full")

    @classmethod
    def reason_against(cls, case: RingCase) -> str | None:
        if cls.package is not None and not installed(cls.package):
            return f"is not installed: pip install {cls.project}"
        if rank_device().type == "cpu" and not cls.on_cpu:
            return "runs on CUDA only"
        kind = case.shape.choice.kind
        if kind not in cls.kinds:
            return f"has no mask {kind!r}, only {', '.join(cls.kinds)}"
        return cls.reason_against_size(case)

    @classmethod
    def reason_against_size(cls, case: RingCase) -> str | None:
        """Return the reason why the package cannot run these sizes, or None."""
        if case.shape.seqlen % (2 * case.world_size):
            return "needs a length that is a multiple of 2 x ranks"
        return None


def _whole_world(case: RingCase) -> str | None:
    """Return the reason against a group that does not have all ranks, or None."""
    if case.world_size != dist.get_world_size():
        return "works only with all ranks: pass one number as --world-size"
    return None


class TorchTemplate(Peer):
    """torch's private ring over its flash operators, with the arguments of context_parallel.

    `Any`: private functions and operators of torch have no types.
    """

    name = "torch-template"
    heads_first = True
    on_cpu = True

    @property
    def label(self) -> str:
        return f"{'zigzag' if self._balanced else 'contiguous'} ring"

    def own_layout(self) -> SequenceLayout:
        # It balances only causal attention.
        self._balanced = self.case.shape.choice.causal
        return self.named_layout("zigzag" if self._balanced else "contiguous")

    def set_up(self) -> Attend:
        from torch.distributed.tensor.experimental._context_parallel import _attention as private

        self._private: Any = private
        self._cuda = rank_device().type == "cuda"
        name = "_scaled_dot_product_flash_attention" + ("" if self._cuda else "_for_cpu")
        self._operator: Any = getattr(torch.ops.aten, name)
        self._backward: Any = getattr(torch.ops.aten, f"{name}_backward").default
        self._options: dict[str, bool | float | None] = {
            "is_causal": self.case.shape.choice.causal,
            "dropout_p": 0.0,
            "scale": None,
        }
        self._saved: tuple[Any, ...] = ()
        return self._operator

    @contextmanager
    def active(self) -> Iterator[None]:
        before = self._private._cp_options.enable_load_balance
        self._private._cp_options.enable_load_balance = self._balanced
        try:
            yield
        finally:
            self._private._cp_options.enable_load_balance = before

    def forward(self) -> None:
        with torch.no_grad():
            self._saved = self._private._templated_ring_attention(
                self.group, 2, self._operator, *self.leaves, **self._options
            )
        self.out = self._saved[0]
        self.grads = ()

    def backward(self) -> None:
        out, lse, *rest = self._saved
        # On CUDA the backward also takes what the forward returned beside out and lse.
        names = ("cum_seq_q", "cum_seq_k", "max_q", "max_k", "philox_seed", "philox_offset")
        further = dict(zip(names, rest, strict=False)) if self._cuda else {}
        with torch.no_grad():
            grads = self._private._templated_ring_attention_backward(
                self.group,
                2,  # the sequence dim
                self._backward,
                self._dout,
                "grad_out",
                *self.leaves,
                out,
                lse,
                **self._options,
                **further,
            )
        self.grads = grads[:3]

    def release(self) -> None:
        super().release()
        self._saved = ()


class TorchContextParallel(Peer):
    """scaled_dot_product_attention in torch's `context_parallel`, with its head-tail balance."""

    name = "torch-context-parallel"
    heads_first = True

    @property
    def label(self) -> str:
        return "zigzag all-gather"

    @classmethod
    def reason_against_size(cls, case: RingCase) -> str | None:
        if not case.shape.choice.causal:
            return "balances only causal attention, and its switch is private"
        return super().reason_against_size(case)

    def own_layout(self) -> SequenceLayout:
        return self.named_layout("zigzag")

    def set_up(self) -> Attend:
        shape = self.case.shape
        self._mesh = DeviceMesh.from_group(self.group, rank_device().type)
        grouped = shape.kv_heads != shape.heads
        return lambda q, k, v: F.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=grouped
        )

    @contextmanager
    def active(self) -> Iterator[None]:
        from torch.distributed.tensor.experimental import context_parallel

        # The shards are cut already: the context only patches scaled_dot_product_attention.
        buffer = torch.zeros(1, 2 * self.case.world_size, device=rank_device())
        with context_parallel(self._mesh, buffers=[buffer], buffer_seq_dims=[1]):
            yield


class RingFlashAttn(Peer):
    """zhuzilin's package: zigzag for causal masks, its ring for full ones, llama3 for documents."""

    name = "ring-flash-attn"
    package, project = "ring_flash_attn", "ring-flash-attn"
    kinds = ("causal", "full", "docs")

    @property
    def label(self) -> str:
        names = {"causal": "zigzag ring", "full": "ring", "docs": "llama3 all-gather"}
        return names[self.case.shape.choice.kind]

    @classmethod
    def reason_against_size(cls, case: RingCase) -> str | None:
        if case.shape.choice.kind == "docs" and case.shape.batch > 1:
            return "packs documents into one sequence: pass --batch 1"
        return super().reason_against_size(case)

    def own_layout(self) -> SequenceLayout:
        causal = self.case.shape.choice.kind == "causal"
        return self.named_layout("zigzag" if causal else "contiguous")

    def set_up(self) -> Attend:
        module: Any = import_module("ring_flash_attn")
        choice = self.case.shape.choice
        if choice.kind == "causal":
            return partial(module.zigzag_ring_flash_attn_func, causal=True, group=self.group)
        if choice.kind == "full":
            return partial(module.ring_flash_attn_func, causal=False, group=self.group)
        boundaries = torch.tensor(
            choice.cuts(self.case.shape.seqlen), dtype=torch.int32, device=rank_device()
        )
        cu_q, cu_k, max_q, max_k, part = module.llama3_flash_attn_prepare_cu_seqlens(
            boundaries, causal=True, rank=self.rank, world_size=self.case.world_size
        )
        attend = partial(
            module.llama3_flash_attn_varlen_func,
            cu_seqlens_q=cu_q,
            cu_seqlens_k=cu_k,
            max_seqlen_q=max_q,
            max_seqlen_k=max_k,
            heads_k_stride=1,
            local_k_slice=part,
            causal=True,
            group=self.group,
        )
        return lambda q, k, v: attend(q[0], k[0], v[0])[None]


class RingAttentionPytorch(Peer):
    """lucidrains' package: its function for any device, on contiguous shards.

    On CUDA it has a kernel; on CPUs it is written in operators of torch.
    """

    name = "ring-attention-pytorch"
    package, project = "ring_attention_pytorch", "ring-attention-pytorch"
    on_cpu = True

    @property
    def label(self) -> str:
        return "striped ring" if self._striped else "ring"

    @classmethod
    def reason_against_size(cls, case: RingCase) -> str | None:
        if case.shape.kv_heads != case.shape.heads:
            return "gives query head i the kv head i % kv_heads; other packages i // group"
        if case.shape.seqlen % case.world_size:
            return "needs a length that is a multiple of the ranks"
        return _whole_world(case)

    def own_layout(self) -> SequenceLayout:
        # The kernel for CUDA has stripes of one row, which balance a causal mask.
        self._striped = self.case.shape.choice.causal and rank_device().type == "cuda"
        return self.named_layout("striped" if self._striped else "contiguous")

    def set_up(self) -> Attend:
        module: Any = import_module("ring_attention_pytorch")
        on_cuda = rank_device().type == "cuda"
        function = module.ring_flash_attn_cuda if on_cuda else module.ring_flash_attn
        return partial(
            function,
            causal=self.case.shape.choice.causal,
            # The default of the package's modules.
            bucket_size=512,
            ring_reduce_col=True,
            striped_ring_attn=self._striped,
            ring_size=self.case.world_size,
        )


class Yunchang(Peer):
    """USP: Ulysses within the largest group that divides the kv heads, a ring between groups."""

    name = "yunchang"
    package, project = "yunchang", "yunchang"

    @property
    def label(self) -> str:
        return f"ulysses {self._ulysses} x {self._kind} ring"

    @classmethod
    def reason_against_size(cls, case: RingCase) -> str | None:
        return super().reason_against_size(case) or _whole_world(case)

    def own_layout(self) -> SequenceLayout:
        world_size, kv_heads = self.case.world_size, self.case.shape.kv_heads
        degrees = [n for n in range(1, world_size + 1) if world_size % n == 0 == kv_heads % n]
        self._ulysses = max(degrees)
        self._kind = "zigzag" if self.case.shape.choice.causal else "basic"
        return self.named_layout("contiguous")  # unused: the package cuts the sequence itself

    def set_up(self) -> Attend:
        module: Any = import_module("yunchang")
        ring = self.case.world_size // self._ulysses
        module.set_seq_parallel_pg(self._ulysses, ring, self.rank, self.case.world_size)
        self._extract = partial(
            module.EXTRACT_FUNC_DICT[self._kind],
            rank=self.rank,
            world_size=self.case.world_size,
            rd=ring,
            ud=self._ulysses,
        )
        attention = module.LongContextAttention(ring_impl_type=self._kind)
        return partial(attention, causal=self.case.shape.choice.causal)

    def num_rows(self) -> int:
        return self.case.shape.seqlen // self.case.world_size

    def take(self, x: Tensor) -> Tensor:
        taken: Tensor = self._extract(x)
        return taken

    def gather(self, x: Tensor) -> Tensor:
        # The order of rows is the package's: cut their numbers as it cuts tensors.
        positions = torch.arange(self.case.shape.seqlen, device=x.device)
        own = self._extract(positions[None, :, None, None].float())[0, :, 0, 0].long()
        return _scattered(x, own, self.case, self.group)


class TransformerEngine(Peer):
    """TransformerEngine's DotProductAttention with a context parallel group."""

    name = "transformer-engine"
    package, project = "transformer_engine", "transformer-engine[pytorch]"

    @property
    def label(self) -> str:
        return "zigzag ring (p2p)"

    def own_layout(self) -> SequenceLayout:
        return self.named_layout("zigzag")

    def set_up(self) -> Attend:
        module: Any = import_module("transformer_engine.pytorch")
        shape = self.case.shape
        kind = "causal" if shape.choice.causal else "no_mask"
        attention = module.DotProductAttention(
            num_attention_heads=shape.heads,
            kv_channels=shape.head_dim,
            num_gqa_groups=shape.kv_heads,
            attention_dropout=0.0,
            qkv_format="bshd",
            attn_mask_type=kind,
        )
        ranks = dist.get_process_group_ranks(self.group)
        attention.set_context_parallel_group(
            self.group, ranks, torch.cuda.Stream(), cp_comm_type="p2p"
        )
        # It returns (batch, rows, heads x dim).
        return lambda q, k, v: attention(q, k, v).unflatten(-1, (shape.heads, -1))


class MagiAttention(Peer):
    """MagiAttention, which chooses the rows of each rank itself."""

    name = "magi-attention"
    package, project = "magi_attention", "magi-attention, from its repository"
    kinds = ("causal", "full", "docs", "chunked")
    # Its README and its benchmarks use this size.
    chunk_size = 512

    @property
    def label(self) -> str:
        return "dispatched chunks"

    @classmethod
    def reason_against_size(cls, case: RingCase) -> str | None:
        if case.shape.batch > 1:
            return "packs sequences into one: pass --batch 1"
        return None

    def own_layout(self) -> SequenceLayout:
        return self.named_layout("contiguous")  # unused: the package cuts the sequence itself

    def set_up(self) -> Attend:
        self._api: Any = import_module("magi_attention.api")
        common: Any = import_module("magi_attention.common")
        enum: Any = import_module("magi_attention.common.enum")
        shape = self.case.shape
        slices = shape.mask.slices
        ranges = [([each.q_start, each.q_end], [each.k_start, each.k_end]) for each in slices]
        kind = enum.AttnMaskType.CAUSAL if shape.choice.causal else enum.AttnMaskType.FULL
        self._key = self._api.magi_attn_flex_key(
            q_ranges=common.AttnRanges.from_ranges([q for q, _ in ranges]),
            k_ranges=common.AttnRanges.from_ranges([k for _, k in ranges]),
            attn_mask_type=[kind] * len(ranges),
            total_seqlen_q=shape.seqlen,
            total_seqlen_k=shape.seqlen,
            num_heads_q=shape.heads,
            num_heads_kv=shape.kv_heads,
            head_dim=shape.head_dim,
            pad_size=self._api.compute_pad_size(
                total_seqlen_q=shape.seqlen,
                cp_size=self.case.world_size,
                chunk_size=self.chunk_size,
            ),
            chunk_size=self.chunk_size,
            cp_group_or_mesh=self.group,
        )
        return lambda q, k, v: self._api.calc_attn(q=q, k=k, v=v, key=self._key)[0]

    def num_rows(self) -> int:
        positions = torch.zeros(self.case.shape.seqlen, 1, device=rank_device())
        return int(self._api.dispatch(positions, key=self._key).size(0))

    def take(self, x: Tensor) -> Tensor:
        taken: Tensor = self._api.dispatch(x[0], key=self._key)
        return taken[None]

    def arrange(self, x: Tensor) -> Tensor:
        return x[0]

    def restore(self, x: Tensor) -> Tensor:
        return x[None]

    def gather(self, x: Tensor) -> Tensor:
        whole: Tensor = self._api.undispatch(x=x[0].contiguous(), key=self._key)
        return whole[None]


def _scattered(x: Tensor, own: Tensor, case: RingCase, group: dist.ProcessGroup) -> Tensor:
    """Return the whole of rows (batch, rows, heads, dim) whose positions are `own`."""
    parts = [torch.empty_like(x) for _ in range(case.world_size)]
    positions = [torch.empty_like(own) for _ in range(case.world_size)]
    dist.all_gather(parts, x.contiguous(), group=group)
    dist.all_gather(positions, own, group=group)
    whole = x.new_zeros(x.size(0), case.shape.seqlen, *x.shape[2:])
    whole[:, torch.cat(positions)] = torch.cat(parts, 1)
    return whole


RING_PEERS: dict[str, type[RingImpl]] = {
    peer.name: peer
    for peer in (
        Dense,
        TorchTemplate,
        TorchContextParallel,
        RingFlashAttn,
        RingAttentionPytorch,
        Yunchang,
        TransformerEngine,
        MagiAttention,
    )
}
