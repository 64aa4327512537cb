"""Trains the demo's model on a mesh (pp, dp, cp, tp), with torch's parallelism and ring attention.

    one batch of sequences on pp=2, dp=2, cp=2, tp=2

     axis splits              example
     dp   sequences           replica 0: s0 s1                 replica 1: s2 s3
     pp   layers              stage 0: embed, layers 0 1  -->  stage 1: layers 2 3, norm, head
                              microbatch after microbatch: m0 = s0, m1 = s1
     cp   rows                of every sequence, by the layout; K and V of a layer travel
     tp   heads               and columns of the MLP; two all-reduces a layer

               parameters along the axis         gradients along the axis
     pp        different                         not exchanged
     dp, cp    equal; with FSDP a shard each     summed: `sync_gradients`; FSDP: reduce-scatter
     tp        a shard of each matrix; norms,    not exchanged: gradients of norms, embedding and
               embedding and head equal          head are complete, and equal, on every rank

Each rank differentiates its share of one mean: the losses of its rows, divided by the targets of
the *whole* batch. The shares of microbatches and ranks add up, however uneven they are. So nothing
may average again: the schedule has `scale_grads=False`, and FSDP, which by default divides by its
number of ranks, has the factor 1.

The schedule also cuts other inputs of its stages into microbatches: `position_ids` for every stage
(RoPE needs the global positions of a shard's rows), and shifted labels for the last stage.

Mistakes to avoid:

    - passing the mesh or the default group to ring_attention: its ranks are one axis, `mesh["cp"]`
    - passing position_ids of shape (1, rows) to the schedule: it makes no more microbatches than
      an input's first dim; `expand` to (batch, rows) copies nothing
    - running microbatches, layers or recomputation in different orders on the ranks of a ring: they
      communicate in every layer, forward and backward, and would deadlock
    - shifting labels within a shard, averaging over a rank's own rows, clipping by its own norm
    - calling `sync_gradients` if FSDP spans the ring: it raises
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable
from dataclasses import asdict, astuple, dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from ring_attn import SequenceLayout, Strategy, ring_attention, shard_batch, sync_gradients, unshard
from ring_attn.core.strategy import resolve_strategy
from ring_attn.tools.model import (
    Attention,
    ModelConfig,
    Transformer,
    mean_loss,
    rope_rotation,
    token_losses,
)

# For dim 128; wider layers take smaller steps. Twice the rate, or no clipping, trains no better in
# few steps, and amplifies roundings tens of times as much.
LEARNING_RATE = 1e-3
CLIP_NORM = 1.0

AXES = ("pp", "dp", "cp", "tp")

# Number of stages per rank, by the pipeline's schedule.
SCHEDULES = {"gpipe": 1, "1f1b": 1, "interleaved": 2}


@dataclass(frozen=True)
class Axes:
    """Sizes of a mesh's axes, from the slowest: ranks that differ in tp only are consecutive."""

    pp: int = 1
    dp: int = 1
    cp: int = 1
    tp: int = 1

    @staticmethod
    def parse(text: str) -> Axes:
        """Parses "cp=2,tp=2", any axes in any order; raises ValueError."""
        sizes: dict[str, int] = {}
        for part in text.split(","):
            match = re.fullmatch(r"\s*(\w+)\s*=\s*(\d+)\s*", part)
            if match is None or match[1] not in AXES or match[1] in sizes or int(match[2]) < 1:
                raise ValueError(
                    f"mesh must be sizes of some of the axes {', '.join(AXES)}, each once, such "
                    f"as cp=2,tp=2, got {text!r}"
                )
            sizes[match[1]] = int(match[2])
        return Axes(**sizes)

    @property
    def size(self) -> int:
        return self.pp * self.dp * self.cp * self.tp

    def __str__(self) -> str:
        named = asdict(self).items()
        return ",".join(f"{name}={size}" for name, size in named if size > 1) or "cp=1"

    def mesh(self, device_type: str) -> DeviceMesh:
        """Makes the mesh; collective over all ranks."""
        return init_device_mesh(device_type, astuple(self), mesh_dim_names=AXES)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of a training, the same on every rank; ValueError if sizes do not fit together.

    `batch` counts the sequences of all replicas. bfloat16 means autocast; with float64 the weights
    are float64 too.
    """

    axes: Axes
    model: ModelConfig
    seqlen: int
    batch: int = 1
    microbatches: int = 1
    schedule: str = "1f1b"
    fsdp: bool = False
    strategy: str | Strategy = "ring"
    layout: str = "zigzag"
    dtype: torch.dtype = torch.float32
    seed: int = 0

    def __post_init__(self) -> None:
        model, axes = self.model, self.axes
        if self.schedule not in SCHEDULES:
            raise ValueError(f"schedule must be one of {list(SCHEDULES)}, got {self.schedule!r}")
        least, kv_width = max(2, axes.cp), model.nheads_kv * model.headdim
        widths = (model.nheads, model.hidden_dim, kv_width)
        fits = (
            self.seqlen >= least
            and self.num_stages <= model.num_layers
            and self.batch % (axes.dp * self.microbatches) == 0
            and all(width % axes.tp == 0 for width in widths)
            and (model.nheads_kv % axes.tp == 0 or axes.tp % model.nheads_kv == 0)
        )
        if not fits:
            raise ValueError(
                f"mesh {axes} with schedule {self.schedule!r} and microbatches={self.microbatches} "
                f"needs seqlen of at least {least} (a byte for each rank of cp, and one to "
                f"predict), at least {self.num_stages} layers, a batch that divides by dp * "
                "microbatches, heads, hidden_dim and nheads_kv * headdim that divide by tp, and "
                "nheads_kv that divide by tp or tp by them; got "
                f"seqlen={self.seqlen}, layers={model.num_layers}, batch={self.batch}, "
                f"nheads={model.nheads}, nheads_kv={model.nheads_kv}, headdim={model.headdim}, "
                f"hidden_dim={model.hidden_dim}"
            )
        if self.strategy != "auto":
            resolve_strategy(self.strategy, axes.cp)

    @property
    def num_stages(self) -> int:
        return self.axes.pp * SCHEDULES[self.schedule]

    def autocast(self, device: torch.device) -> contextlib.AbstractContextManager[object]:
        """The context in which the model and its loss are computed."""
        if self.dtype == torch.bfloat16:
            return torch.autocast(device.type, self.dtype)
        return contextlib.nullcontext()

    def make_model(self, device: torch.device) -> Transformer:
        """The whole model, with the same weights in every process."""
        torch.manual_seed(self.seed)
        model = Transformer(self.model).to(device)
        return model.double() if self.dtype == torch.float64 else model

    def make_optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        rate = LEARNING_RATE * 128 / self.model.dim
        # One `foreach` operator cannot take both plain parameters and DTensors.
        return torch.optim.AdamW(parameters, lr=rate, betas=(0.9, 0.95), foreach=False)


class Stage(nn.Module):
    """Consecutive layers of a model; the first stage also embeds, the last has norm and head.

    Parameters are the model's, under the same names.
    """

    def __init__(
        self, model: Transformer, index: int, attention: Attention, settings: Settings
    ) -> None:
        super().__init__()
        num_stages = settings.num_stages
        is_first, is_last = index == 0, index == num_stages - 1
        cuts = [i * len(model.layers) // num_stages for i in (index, index + 1)]
        self.embed_tokens = model.embed_tokens if is_first else nn.Identity()
        self.layers = nn.ModuleDict({str(i): model.layers[i] for i in range(*cuts)})
        self.norm = model.norm if is_last else nn.Identity()
        self.lm_head = model.lm_head if is_last else nn.Identity()
        self._attention, self._settings = attention, settings

    def forward(self, x: Tensor, position_ids: Tensor) -> Tensor:
        """Maps ids (batch, rows) or activations (batch, rows, dim) to activations or logits.

        position_ids are (batch, rows): the schedule cuts them along with the batch.
        """
        with self._settings.autocast(x.device):
            x = self.embed_tokens(x)
            rotation = rope_rotation(position_ids, self._settings.model, x.dtype)
            for layer in self.layers.values():
                x = layer(x, rotation, self._attention)
            return self.lm_head(self.norm(x))


class MeshTrainer:
    """Trains this rank's part of a model on a mesh.

    All methods are collective over the mesh and take the same arguments on every rank; each rank
    cuts its part out of a batch.

    Attributes:
        parameter_sizes: number of elements of each of the whole model's parameters, in order.
    """

    def __init__(self, settings: Settings, mesh: DeviceMesh, device: torch.device) -> None:
        self.settings, self.mesh, self.device = settings, mesh, device
        axes = settings.axes
        self._at = {axis: mesh.get_local_rank(axis) for axis in AXES}
        self.layout = SequenceLayout.from_name(settings.layout, settings.seqlen, axes.cp)
        # Ranks that differ in dp and cp only have the same parameters.
        self._replicas = mesh["dp", "cp"]._flatten("dp_cp")

        whole = settings.make_model(device)
        self._names = [name for name, _ in whole.named_parameters()]
        self.parameter_sizes = [p.numel() for p in whole.parameters()]
        attention = partial(
            ring_attention,
            causal=True,
            group=mesh["cp"],
            layout=self.layout,
            strategy=settings.strategy,
        )
        indices = range(self._at["pp"], settings.num_stages, axes.pp)
        stages = [Stage(whole, i, attention, settings) for i in indices]
        if axes.tp > 1:
            for stage in stages:
                _shard_heads(stage, mesh["tp"], settings.model)
        if settings.fsdp:
            for stage in stages:
                _shard_parameters(stage, self._replicas)
        self.stages = nn.ModuleList(stages)
        self._is_first, self._is_last = indices[0] == 0, indices[-1] == settings.num_stages - 1
        self._schedule = self._pipeline(list(indices))
        self._optimizer = settings.make_optimizer(self.stages.parameters())

    def step(self, batch: dict[str, Tensor]) -> float:
        """Trains on one batch; returns its mean loss before the update."""
        loss, _ = self.backward(batch)
        self._clip(CLIP_NORM)
        self._optimizer.step()
        return loss

    def backward(self, batch: dict[str, Tensor]) -> tuple[float, Tensor | None]:
        """Writes the gradients of the whole batch to the parameters.

        Args:
            batch: `input_ids` and `labels`, (batch, seqlen) int64 each, the same on every rank.

        Returns:
            The mean loss of the whole batch, and on the last stage the losses (batch / dp, rows) of
            this rank's rows.
        """
        self._optimizer.zero_grad()
        part = self._part_of(batch)
        labels = part["shift_labels"]
        shares: list[Tensor] = []
        first = (part["input_ids"],) if self._is_first else ()
        logits = self._schedule.step(
            *first, target=labels, losses=shares, position_ids=part["position_ids"]
        )
        if not self.settings.fsdp:
            sync_gradients(self.stages, self._replicas)
        loss = torch.zeros((), dtype=torch.float64, device=self.device)
        losses = None
        if self._is_last:
            loss += torch.stack(shares).sum().detach()
            losses = token_losses(logits.detach(), labels)
        return self._summed(loss, "pp", "dp", "cp").item(), losses

    def results_of(self, batch: dict[str, Tensor]) -> Tensor:
        """Each byte's loss, then all gradients: (batch * seqlen + parameters,) on the CPU."""
        _, losses = self.backward(batch)
        whole = None
        if losses is not None:
            of_replica = unshard(losses, self.layout, group=self.mesh["cp"])
            parts = [torch.empty_like(of_replica) for _ in range(self.settings.axes.dp)]
            dist.all_gather(parts, of_replica, group=self.mesh.get_group("dp"))
            whole = torch.cat(parts).flatten().cpu()
        gradients = {name: p.grad for name, p in self._named_parameters() if p.grad is not None}
        return self._gathered(gradients, whole)

    def get_weights(self) -> Tensor:
        """All weights, (number of parameters,) on the CPU, in the whole model's order."""
        return self._gathered(dict(self._named_parameters()), torch.zeros(0))

    def _part_of(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """This rank's rows of this replica's sequences."""
        size = self.settings.batch // self.settings.axes.dp
        start = self._at["dp"] * size
        sequences = {name: x[start : start + size].to(self.device) for name, x in batch.items()}
        part = shard_batch(sequences, self.layout, self._at["cp"])
        part["position_ids"] = part["position_ids"].expand(size, -1)
        return part

    def _pipeline(self, indices: list[int]) -> Any:
        """The schedule over this rank's stages, which communicate along the pp axis."""
        settings = self.settings
        group = self.mesh.get_group("pp")
        stages: list[Any] = [
            pipelining.PipelineStage(stage, i, settings.num_stages, self.device, group=group)
            for i, stage in zip(indices, self.stages, strict=True)
        ]
        options: dict[str, Any] = {
            "n_microbatches": settings.microbatches,
            "loss_fn": self._share_of_loss,
            "scale_grads": False,
        }
        if settings.schedule == "interleaved":
            return pipelining.ScheduleInterleaved1F1B(stages, **options)
        kind = pipelining.Schedule1F1B if settings.schedule == "1f1b" else pipelining.ScheduleGPipe
        return kind(stages[0], **options)

    def _share_of_loss(self, logits: Tensor, shift_labels: Tensor) -> Tensor:
        """This rank's share of the whole batch's mean loss, for one microbatch."""
        settings = self.settings
        with settings.autocast(self.device):
            losses = token_losses(logits, shift_labels)
        # The last byte of a sequence has no target.
        return mean_loss(losses, num_targets=settings.batch * (settings.seqlen - 1))

    def _clip(self, max_norm: float) -> None:
        """Scales all gradients by one factor, so that their total norm is at most max_norm.

        The norm of a DTensor covers all ranks that have a part of it. Stages, along pp, are summed.
        """
        parameters = list(self.stages.parameters())
        norms = [_full(get_total_norm([p.grad])) for p in parameters if p.grad is not None]
        square = self._summed(torch.stack(norms).double().square().sum(), "pp")
        clip_grads_with_norm_(parameters, max_norm, square.sqrt(), foreach=False)

    def _summed(self, x: Tensor, *axes: str) -> Tensor:
        for axis in axes:
            dist.all_reduce(x, group=self.mesh.get_group(axis))
        return x

    def _named_parameters(self) -> Iterable[tuple[str, nn.Parameter]]:
        for stage in self.stages:
            yield from stage.named_parameters()

    def _gathered(self, tensors: dict[str, Tensor], before: Tensor | None) -> Tensor:
        """Concatenates a stage's `before` and the tensors of all stages in the model's order."""
        whole_tensors = {name: _full(x).detach().cpu() for name, x in tensors.items()}
        stages: list[Any] = [None] * self.settings.axes.pp
        dist.all_gather_object(stages, (whole_tensors, before), group=self.mesh.get_group("pp"))
        whole = {name: x for named, _ in stages for name, x in named.items()}
        first = next(x for _, x in stages if x is not None)
        return torch.cat([first, *(whole[name].flatten() for name in self._names)])


def _shard_heads(stage: Stage, mesh: DeviceMesh, config: ModelConfig) -> None:
    """Applies tensor parallelism: splits heads of attention and columns of the MLP over ranks."""
    shared = mesh.size() > config.nheads_kv
    whole: dict[str, Any] = (
        {"output_layouts": Replicate(), "use_local_output": False} if shared else {}
    )
    kv = {name: ColwiseParallel(**whole) for name in ("self_attn.k_proj", "self_attn.v_proj")}
    plan: dict[str, ParallelStyle] = {
        "self_attn.q_proj": ColwiseParallel(),
        **kv,
        "self_attn.o_proj": RowwiseParallel(),
        "mlp.gate_proj": ColwiseParallel(),
        "mlp.up_proj": ColwiseParallel(),
        "mlp.down_proj": RowwiseParallel(),
    }
    head = mesh.get_local_rank() * config.nheads_kv // mesh.size()
    columns = slice(head * config.headdim, (head + 1) * config.headdim)
    for layer in stage.layers.values():
        parallelize_module(layer, mesh, plan)
        for name in kv if shared else ():
            layer.get_submodule(name).register_forward_hook(partial(_take_head, columns))


def _take_head(columns: slice, _module: nn.Module, _args: Any, out: DTensor) -> Tensor:
    """The KV head of this rank's q heads, if there are fewer KV heads than ranks.

    Each rank computes a part of a head; an all-gather gives every rank all heads. Ranks that share
    a KV head each have a part of its gradient: hence Partial.
    """
    return out.to_local(grad_placements=[Partial()])[..., columns]


def _shard_parameters(stage: Stage, mesh: DeviceMesh) -> None:
    """Applies FSDP2 to each layer; sums gradients, as each rank has its share of one mean."""
    for module in (*stage.layers.values(), stage):
        sharded = fully_shard(module, mesh=mesh)
        # Otherwise FSDP passes the factor to an operator that only NCCL has.
        sharded.set_force_sum_reduction_for_comms(True)
        sharded.set_gradient_divide_factor(1.0)


def _full(x: Tensor) -> Tensor:
    """The full tensor of a DTensor, on every rank that holds a part; other tensors unchanged."""
    return x.full_tensor() if isinstance(x, DTensor) else x
