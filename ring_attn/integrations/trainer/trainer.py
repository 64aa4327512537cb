"""A subclass of a Trainer whose steps shard each sequence over the ranks of a group."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.functional import cross_entropy

from ring_attn.core.layout import SequenceLayout
from ring_attn.integrations.trainer.batches import as_documents, fingerprint, num_targets
from ring_attn.integrations.transformers.cache import LAYOUT
from ring_attn.integrations.transformers.masks import tokens_of
from ring_attn.integrations.transformers.models import first_position
from ring_attn.integrations.transformers.registration import Registration
from ring_attn.integrations.transformers.stacks import numbers_own_rows
from ring_attn.integrations.transformers.untyped import Keywords, Model, Value
from ring_attn.models.batch import shard_batch, unshard
from ring_attn.models.logprobs import whole_rows
from ring_attn.transport import groups
from ring_attn.transport.p2p import check_pending, reporting
from ring_attn.transport.ranks.identity import set_step

# A Trainer of transformers or TRL, or its class; mypy skips these packages.
HFTrainer: TypeAlias = Any

# Losses of transformers with a term for each token. All but the first may divide by the labels of
# one rank.
CAUSAL_LOSS = "ForCausalLMLoss"
LOSSES_OF_TOKENS = {CAUSAL_LOSS, "ForMaskedLMLoss", "ForTokenClassification"}

# A function of a user, or of transformers, with its own parameters.
Function = Callable[..., Value]

# The trainers of TRL that have the loss of transformers, and their base.
TRL = {"SFTTrainer", "_BaseTrainer"}

# Attributes of a Trainer that must be false or None, and why.
REFUSED = {
    "is_deepspeed_enabled": "it is untested how DeepSpeed scales gradients",
    "args.neftune_noise_alpha": "its noise depends on the rank's rows",
    "args.accelerator_config.dispatch_batches": "accelerate gives each rank different batches",
}


def split_sequence(trainer_class: HFTrainer) -> HFTrainer:
    """Return a subclass of a Trainer that shards each sequence over the ranks of a group.

    The group is the one that `register` got. The constructor takes the same arguments as before.
    All ranks of a group must get the same batches, which is checked before each step.

    Args:
        trainer_class: `transformers.Trainer`, `trl.SFTTrainer` or a subclass of either, for causal
            language models with a registered `attn_implementation`; with `compute_loss_func` also
            for other losses of tokens. Models that number their own rows get whole batches.

    Returns:
        The class. Its constructor raises ValueError if the model has another attention
        implementation, the group is not consecutive ranks or does not divide their number, or
        accelerate's context parallelism is on. It raises NotImplementedError for options that would
        give wrong results: NEFTune, DeepSpeed, and accelerate's tensor parallelism; and for losses
        of whole sequences. The first step raises NotImplementedError if the loss, of the model or
        of an overridden compute_loss, differs from the cross-entropy of the logits, as
        transformers' causal loss computes it.

    Raises:
        ImportError: transformers or accelerate is not installed.
        NotImplementedError: `trainer_class` is another trainer of TRL.
        TypeError: `trainer_class` is not a Trainer.

    Example:
        >>> from transformers import Trainer
        >>> split_sequence(Trainer).__name__
        'SplitSequenceTrainer'
    """
    try:
        from accelerate import Accelerator  # noqa: F401
        from transformers import Trainer
    except ImportError as error:
        raise ImportError(
            "the Trainer needs transformers and accelerate: pip install 'ring-attn[trainer]'"
        ) from error
    if not (isinstance(trainer_class, type) and issubclass(trainer_class, Trainer)):
        raise TypeError(
            f"trainer_class must be transformers.Trainer or a subclass, got {trainer_class!r}; "
            "pass the class, not a trainer: split_sequence(Trainer)(model=model, ...)"
        )
    for ancestor in trainer_class.__mro__:
        if ancestor.__module__.startswith("trl.") and ancestor.__name__ not in TRL:
            raise NotImplementedError(
                f"{ancestor.__name__} computes a loss of several texts together: of TRL's trainers "
                "only SFTTrainer works on sharded sequences"
            )
    if issubclass(trainer_class, _SplitSequence):
        return trainer_class
    return type(f"SplitSequence{trainer_class.__name__}", (_SplitSequence, trainer_class), {})


# A type checker takes any attribute of the base for granted: `split_sequence` adds the real base.
_Base: HFTrainer = object


class _SplitSequence(_Base):
    """Methods that precede the Trainer's methods in the method resolution order."""

    preprocess_logits_for_metrics: Function | None
    label_smoother: Function | None
    compute_loss_func: Function | None

    def __init__(self, *args: object, **kwargs: object) -> None:
        from transformers import TrainerCallback
        from transformers.integrations.liger import apply_liger_kernel

        super().__init__(*args, **kwargs)
        check_trainer(self)
        self.ring = TrainerRing.of(self)
        # Such a model gets whole batches, and all ranks of a group compute the same loss.
        self.gives_whole_batches = numbers_own_rows(self.model)
        if self.gives_whole_batches:
            check_one_group(self)
        has_adapters = hasattr(self.model, "get_base_model")
        self.first_position = first_position(
            self.model.get_base_model() if has_adapters else self.model
        )
        keep_gradients(self.model)
        # Every rank reads an iterable dataset: otherwise accelerate gives each rank other batches.
        self.accelerator.dataloader_config.dispatch_batches = False
        # TRL sums its figures over all ranks; gather_for_metrics would leave out ranks for which
        # the last batch has no additional sample.
        self.accelerator.gather_for_metrics = self.accelerator.gather
        # The Trainer applies Liger's kernels in train(), which is too late for evaluate().
        if self.args.use_liger_kernel:
            apply_liger_kernel(self.model, self.args.liger_kernel_config)
        if self.label_smoother is not None:
            self.label_smoother = partial(_smooth_shifted, self.label_smoother)
        self._loss_checked: set[bool] = set()
        self.own_preprocess: Function | None = None  # during an evaluation
        # On NCCL an error of a call is raised later, at the latest before the optimizer uses the
        # gradients.
        group = self.ring.group
        methods = {"on_pre_optimizer_step": lambda *_args, **_kwargs: check_pending(group)}
        self.add_callback(type("ChecksCalls", (TrainerCallback,), methods))

    def train(self, *args: object, **kwargs: object) -> object:
        """Train the model, as the Trainer does."""
        from torch.distributed.fsdp import FSDPModule

        keep_gradients(self.model)
        # An earlier evaluation sets an attribute that would keep accelerate from wrapping with DDP.
        if self.model_wrapped is self.model and not self.is_fsdp_enabled:
            self.model._is_accelerate_prepared = False
        # It also leaves parameters unsharded. The optimizer would update these instead of FSDP2's
        # shards.
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
        return super().train(*args, **kwargs)

    def get_cp_size(self) -> int:
        """Return the number of ranks with the same batch."""
        return self.ring.size

    def _get_dataloader(self, *args: object, **kwargs: object) -> object:
        """Return the data loader of training, evaluation or prediction."""
        with self.ring.data_parallel(self.accelerator):
            return super()._get_dataloader(*args, **kwargs)

    @property
    def shifts_labels(self) -> bool:
        """Return whether the Trainer counts the labels without the first one of each row.

        It does not for classes whose `loss_type` transformers does not know, such as
        GPT2LMHeadModel, although their losses shift labels.
        """
        return getattr(self, "_loss_shifts_labels", False)

    def _get_num_items_in_batch(
        self, batch_samples: Sequence[Keywords], device: torch.device
    ) -> Tensor | None:
        """Return the number of targets of all groups; refuse differences within a group."""
        count = torch.zeros((), dtype=torch.int64, device=device)
        for batch in batch_samples:
            count += num_targets(batch, shifts=self.shifts_labels).to(device)
        of_rank = torch.stack([count, fingerprint(batch_samples, device)])
        counts, fingerprints = self.accelerator.gather(of_rank).view(-1, 2).T.tolist()
        self.ring.check_same(fingerprints)
        if not batch_samples:
            return None
        one_of_each_group = counts[:: self.ring.size]
        return torch.tensor(sum(one_of_each_group), device=device)

    def compute_loss(
        self,
        model: Model,
        inputs: Keywords,
        return_outputs: bool = False,
        num_items_in_batch: Tensor | None = None,
    ) -> Value:  # the loss, or with `return_outputs` the loss and the model's outputs
        """Compute the Trainer's loss of this rank's rows; `inputs` have all rows of the batch."""
        set_step(self.state.global_step)
        if num_items_in_batch is None:  # TRL's evaluation leaves it out
            num_items_in_batch = self._get_num_items_in_batch([inputs], self.args.device)
        if self.gives_whole_batches:
            result = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
            loss, *outputs = result if return_outputs else (result,)
            # The Trainer multiplies other losses by the number of ranks itself.
            if not (self.model_accepts_loss_kwargs or self.compute_loss_func):
                loss = loss * self.ring.size
            loss = share_of_value(loss, self.ring.size)
            return (loss, *outputs) if return_outputs else loss
        shard = self.ring.shard(inputs, self.first_position)
        compute = partial(super().compute_loss, model, shard, return_outputs, num_items_in_batch)
        custom_loss = self.compute_loss_func
        if custom_loss is not None:
            self.compute_loss_func = partial(self.ring.whole_loss, custom_loss, inputs)
            try:
                return compute()
            finally:
                self.compute_loss_func = custom_loss
        if model.training in self._loss_checked:
            return compute()
        self._loss_checked.add(model.training)
        with _outputs(model) as outputs:
            result = compute()
            if self.args.use_liger_kernel and getattr(outputs[0], "logits", None) is None:
                # Liger's loss in training leaves the logits out.
                without_labels = {name: x for name, x in shard.items() if name != "labels"}
                with torch.no_grad():
                    outputs[0] = model(**{**without_labels, "skip_logits": False})
        loss = result[0] if return_outputs else result
        assert num_items_in_batch is not None, "there is a batch"
        _check_loss(self, loss, outputs, shard["shift_labels"], num_items_in_batch)
        return result

    def prediction_step(
        self,
        model: Model,
        inputs: Keywords,
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[Tensor, object, object]:
        """Return loss, predictions and labels of a batch, the same on all ranks of a group.

        Predictions and labels have the rows of the batch, in their order.
        """
        num_targets(inputs, shifts=self.shifts_labels)
        inputs = self._prepare_inputs(inputs)
        loss, found, labels = super().prediction_step(
            model, inputs, prediction_loss_only, ignore_keys
        )
        dist.all_reduce(loss, group=self.ring.group)
        loss = loss / self.ring.size
        if prediction_loss_only:
            return loss, None, None
        if self.gives_whole_batches:
            if self.own_preprocess is not None:
                found = self.own_preprocess(found, labels)
            return loss, found, labels
        return loss, self.ring.predictions(found, inputs, self.own_preprocess), labels

    def evaluation_loop(self, *args: object, **kwargs: object) -> object:
        """Evaluate or predict, as the Trainer does."""
        self.gather_function = self._gather_once
        # `prediction_step` calls it on a rank's rows: its results are small, and all logits large.
        self.own_preprocess = self.preprocess_logits_for_metrics
        self.preprocess_logits_for_metrics = None
        try:
            return super().evaluation_loop(*args, **kwargs)
        finally:
            self.preprocess_logits_for_metrics = self.own_preprocess
            self.own_preprocess = None

    # The results of a metric: tensors, tuples and lists of them.
    def _gather_once(self, x: Value) -> Value:
        """Gather samples like accelerate's gather_for_metrics, but each group's samples once."""
        if isinstance(x, tuple | list):
            return type(x)(map(self._gather_once, x))
        gathered = self.accelerator.gather(x.contiguous())
        of_groups = gathered.view(-1, self.ring.size, *x.shape)  # (groups, ranks, samples, ...)
        once = of_groups[:, 0].flatten(0, 1)  # (groups * samples, ...)
        state = self.accelerator.gradient_state
        # accelerate fills the last batch with repeated samples.
        if state.end_of_dataloader and state.remainder > 0:
            return once[: state.remainder]
        return once

    def floating_point_ops(self, inputs: Keywords) -> int:
        """Return this rank's share of the batch's FLOPs."""
        return super().floating_point_ops(inputs) // self.ring.size


def _smooth_shifted(
    smoother: Function, outputs: object, labels: Tensor, shift_labels: bool, **options: object
) -> object:
    """Call a label smoother with labels that are shifted already."""
    return smoother(outputs, labels, **options)


@dataclass(frozen=True)
class TrainerRing:
    """This rank's group, which shares each sequence, and the mesh of all ranks."""

    group: dist.ProcessGroup
    rank: int
    size: int
    layout: str
    mesh: DeviceMesh

    @staticmethod
    def of(trainer: HFTrainer) -> TrainerRing:
        """Return the ring of the model's registration; refuse groups that are not consecutive."""
        registered = _registration(trainer.model)
        group = groups.check_group(registered.group)
        ranks, world_size = dist.get_process_group_ranks(group), dist.get_world_size()
        size = len(ranks)
        first = dist.get_rank() // size * size
        if world_size % size or ranks != list(range(first, first + size)):
            raise ValueError(
                f"the group of register() must be consecutive ranks of {world_size}, and its size "
                f"a divisor of {world_size}, got {ranks}: make a mesh with the sequence in its "
                "last axis, init_device_mesh(device, (dp, cp)), and register(group=mesh['cp'])"
            )
        # With these names, the data loader of accelerate gives the ranks of "cp" the same batches.
        mesh = init_device_mesh(
            trainer.accelerator.device.type,
            (world_size // size, size),
            mesh_dim_names=("dp_replicate", "cp"),
        )
        return TrainerRing(group, dist.get_rank(group), size, registered.layout, mesh)

    @contextmanager
    def data_parallel(self, accelerator: Value) -> Iterator[None]:
        """Make accelerate's data loaders give each group its batches, if they are made inside."""
        state = accelerator.state
        original = state.device_mesh
        state.device_mesh = self.mesh
        try:
            yield
        finally:
            state.device_mesh = original

    def check_same(self, fingerprints: list[int]) -> None:
        """Raise an error on every rank if batches differ within a group."""
        for rank, got in enumerate(fingerprints):
            first = rank // self.size * self.size
            if got != fingerprints[first]:
                raise ValueError(
                    f"ranks {first} and {rank} must get the same batches, because they share each "
                    "sequence, but got different ones: random choices of a dataset, sampler or "
                    "collator must be the same on both"
                )

    def layout_of(self, rows: dict[str, Tensor]) -> SequenceLayout:
        """Return the layout of a batch that was converted to one sequence."""
        return SequenceLayout.from_name(self.layout, tokens_of(rows).size(1), self.size)

    def shard(self, inputs: Keywords, first: int = 0) -> dict[str, Value]:
        """Return the keywords of the model for this rank's rows of a batch.

        `first` is the position_id of a sequence's first token, for batches without positions.
        """
        rows, others, _ = as_documents(inputs)
        seqlen, layout = tokens_of(rows).size(1), self.layout_of(rows)
        if 0 in layout.shard_lens:  # transformers' models need a row
            raise ValueError(
                f"a batch must have tokens for each of {self.size} ranks, but a batch of {seqlen} "
                "tokens leaves some without tokens: use batches of more or longer sequences"
            )
        shard = shard_batch(rows, layout, self.rank)
        if inputs.get("position_ids") is None:
            shard["position_ids"] = shard["position_ids"] + first
        # The model computes a loss only if it gets labels, but it computes it from shift_labels.
        return {**shard, **others, "labels": shard["shift_labels"], LAYOUT: layout}

    def whole_loss(
        self, function: Function, inputs: Keywords, outputs: Value, _: object, **options: object
    ) -> Tensor:
        """Return this rank's share of a user's loss, which every rank computes of the whole batch.

        The shares and their gradients add up to the loss and its gradients.
        """
        documents = as_documents(inputs)
        layout = self.layout_of(documents.rows)
        logits = documents.batch(whole_rows(outputs.logits, layout, self.rank, self.group))
        loss = function(type(outputs)(logits=logits), inputs.get("labels"), **options)
        return share_of_value(loss, self.size)

    # Predictions are tensors, tuples and lists of them.
    def predictions(self, found: Value, inputs: Keywords, preprocess: Function | None) -> Value:
        """Gather the model's outputs of this rank's rows to the whole batch, (batch, columns, ...).

        `preprocess` is the Trainer's function of logits and labels, and gets this rank's rows.
        """
        documents = as_documents(inputs)
        layout = self.layout_of(documents.rows)
        if preprocess is not None:
            labels = inputs["labels"][documents.kept].unsqueeze(0)  # (1, seqlen)
            found = preprocess(found, layout.shard(labels, self.rank))

        def whole(x: Value) -> Value:
            if isinstance(x, tuple | list):
                return type(x)(map(whole, x))
            shape = tuple(getattr(x, "shape", ()))
            if shape[:2] != (1, layout.shard_len(self.rank)):
                raise NotImplementedError(
                    "predictions must have a row for each token, (1, rows, ...), because they are "
                    f"gathered from ranks, got shape {shape}: remove other predictions with "
                    "preprocess_logits_for_metrics or ignore_keys"
                )
            return documents.batch(unshard(x, layout, group=self.group))

        return whole(found)


def share_of_value(loss: Tensor, size: int) -> Tensor:
    """Divide a loss that all ranks compute by their number, but not its gradient.

    The logits of each rank have only their part of the gradient.
    """
    return loss - loss.detach() * (1 - 1 / size)


@contextmanager
def _outputs(model: Model) -> Iterator[list[Value]]:
    """Collect the outputs of the model's forwards inside the context."""
    outputs: list[Value] = []
    handle = model.register_forward_hook(lambda _model, _args, output: outputs.append(output))
    try:
        yield outputs
    finally:
        handle.remove()


def _check_loss(
    trainer: HFTrainer,
    loss: Tensor,
    outputs: Sequence[object],
    targets: Tensor,
    num_items: Tensor,
) -> None:
    """Refuse a loss that is not the cross-entropy of this rank's rows, divided by all targets.

    A loss that is computed in another way, by the model or by an overridden `compute_loss`, would
    shift labels that are shifted already, or divide by this rank's rows.
    """
    got, expected = float(loss.detach()), float("nan")
    smoothing = trainer.args.label_smoothing_factor
    terms = _terms(outputs[0], targets, smoothing) if outputs else None
    if terms is not None:
        if getattr(trainer.args, "loss_type", "nll") == "dft":
            terms = terms * torch.exp(-terms)
        ranks = trainer.accelerator.num_processes // trainer.get_tp_size()
        expected = float(terms.double().sum() / num_items * ranks)
    # Both have the same float32 terms, which the loss adds in float32, in blocks.
    tolerance = 64 * torch.finfo(torch.float32).eps * abs(expected)
    if not abs(got - expected) <= tolerance:  # also if `expected` is NaN
        with reporting(trainer.ring.group):
            raise NotImplementedError(
                f"the loss of this rank's rows is {got:.6g}, but the cross-entropy of their logits "
                f"is {expected:.6g}: only transformers' causal loss works on sharded sequences, "
                f"not a loss of the model's forward ({type(trainer.model).__name__}) or an "
                f"overridden compute_loss ({type(trainer).__name__}) that shifts labels, divides "
                "or adds terms itself"
            )


def _terms(output: object, targets: Tensor, smoothing: float) -> Tensor | None:
    """Return the cross-entropy of each of this rank's rows; None if the output has no logits."""
    log_probs = getattr(output, "log_probs", None)
    if isinstance(log_probs, Tensor):  # an output of TRL, without logits
        return -log_probs.detach()
    logits = getattr(output, "logits", None)
    if not isinstance(logits, Tensor) or logits.shape[:2] != targets.shape:
        return None
    # In parts, because float32 copies of all logits may not fit in memory.
    logit_parts = logits.detach()[0].split(1024)  # each (1024, vocabulary)
    target_parts = targets[0].split(1024)
    return torch.cat(
        [
            cross_entropy(x.float(), y, reduction="none", label_smoothing=smoothing)
            for x, y in zip(logit_parts, target_parts, strict=True)
        ]
    )


def keep_gradients(model: Model) -> None:
    """Keep bitsandbytes' 4-bit layers in a layout for which gradients can be computed.

    On CPUs with AVX512-BF16 an evaluation converts their weights to a layout for inference, whose
    products torch's autograd does not see: training would continue without most gradients.
    """
    for name, module in model.named_modules():
        if getattr(module, "support_avx512bf16_for_cpu", False):
            module.support_avx512bf16_for_cpu = False
        state = getattr(getattr(module, "weight", None), "quant_state", None)
        if getattr(state, "packing_format_for_cpu", False):
            raise ValueError(
                f"{name} has bitsandbytes' layout for inference on CPUs, which has no gradients, "
                "because the model was evaluated before this trainer was made: load it again"
            )


def _registration(model: Model) -> Registration:
    """Return the registration of a model; refuse other attention implementations."""
    from transformers import AttentionInterface

    name = model.config.get_text_config()._attn_implementation
    attend = AttentionInterface._global_mapping.get(name)
    registered = getattr(attend, "__self__", None)
    if not isinstance(registered, Registration):
        raise ValueError(
            "model must have an attn_implementation of "
            f"ring_attn.integrations.transformers.register, got {name!r}: call register() first, "
            "then load the model with attn_implementation='ring_attn'"
        )
    return registered


def _check_loss_type(trainer: HFTrainer) -> None:
    """Refuse losses that are not sums of terms of tokens, divided by the labels of all ranks."""
    name = type(trainer.model).__name__
    loss = getattr(getattr(trainer.model, "loss_function", None), "__name__", None)
    if loss not in LOSSES_OF_TOKENS:
        raise NotImplementedError(
            f"the loss of {name} is {loss}, which is not a sum over tokens: only losses of tokens "
            "work with split_sequence; write your own training loop with ring_attn.shard_batch and "
            "ring_attn.sync_gradients"
        )
    if trainer.compute_loss_func is not None:
        return
    if loss != CAUSAL_LOSS:
        raise NotImplementedError(
            f"the loss of {name} is {loss}, which would divide by the labels of one rank: pass "
            "compute_loss_func to the trainer, which is called with the logits and labels of the "
            "whole batch"
        )
    if not trainer.model_accepts_loss_kwargs:
        raise NotImplementedError(
            f"the forward of {name} has no keyword num_items_in_batch, so its loss would divide by "
            "the labels of one rank: pass compute_loss_func to the trainer, which is called with "
            "the logits and labels of the whole batch"
        )


def check_one_group(trainer: HFTrainer) -> None:
    """Refuse surroundings in which a model that numbers its own rows would train wrongly.

    Its loss may be the mean of a group's batch, and the sum over groups would be another loss.
    """
    name, ring = type(trainer.model).__name__, trainer.ring
    world_size = dist.get_world_size()
    if ring.size < world_size:
        raise NotImplementedError(
            f"{name} numbers its rows itself, and its loss may be a mean over the batch of one "
            f"group, got groups of {ring.size} of {world_size} ranks: register all ranks as one "
            "group, or write your own training loop with ring_attn.sync_gradients"
        )
    if trainer.is_fsdp_enabled:
        raise NotImplementedError(
            f"{name} numbers its rows itself, which is untested with FSDP: train it with DDP, "
            "which is the default"
        )


def check_trainer(trainer: HFTrainer) -> None:
    """Refuse models and options that would give wrong results on sharded sequences."""
    args, accelerator = trainer.args, trainer.accelerator
    parallel = accelerator.parallelism_config
    if parallel is not None and (parallel.cp_enabled or parallel.sp_enabled):
        raise ValueError(
            "cp_size and sp_size of parallelism_config must be 1, because the group of register() "
            f"shares the sequences, got cp_size={parallel.cp_size} and sp_size={parallel.sp_size}"
        )
    if not numbers_own_rows(trainer.model):
        _check_loss_type(trainer)
    wrong = {name: why for name, why in REFUSED.items() if attrgetter(name)(trainer)}
    if args.include_num_input_tokens_seen not in (False, "no"):
        wrong["include_num_input_tokens_seen"] = "each rank of a group would count the whole batch"
    if getattr(args, "train_sampling_strategy", None) == "batch_rebalance":
        wrong["batch_rebalance"] = "its sampler gives each rank different batches"
    if args.world_size > 1 and not args.average_tokens_across_devices:
        wrong["average_tokens_across_devices=False"] = "each rank would divide by its own labels"
    if parallel is not None and parallel.tp_enabled:
        wrong["tp_size"] = "ranks of a tensor-parallel group have the same rows"
    if args.use_liger_kernel and (args.label_smoothing_factor or trainer.compute_loss_func):
        wrong["use_liger_kernel"] = "its models return no logits, which this loss needs"
    for name, why in wrong.items():
        raise NotImplementedError(
            f"{name} does not work with sharded sequences: {why}; leave it out"
        )
