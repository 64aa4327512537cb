"""A subclass of a Trainer whose steps split each sequence over the ranks of a group."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.functional import cross_entropy

from ring_attn.core.layout import SequenceLayout
from ring_attn.integrations.trainer.batches import as_documents, fingerprint, num_targets
from ring_attn.integrations.transformers.cache import LAYOUT
from ring_attn.integrations.transformers.masks import tokens_of
from ring_attn.integrations.transformers.registration import Registration
from ring_attn.models.batch import shard_batch, unshard
from ring_attn.models.logprobs import whole_rows
from ring_attn.transport import groups
from ring_attn.transport.p2p import check_pending, reporting
from ring_attn.transport.ranks.identity import set_step

# TRL's trainers whose loss is transformers', and their base.
TRL = {"SFTTrainer", "_BaseTrainer"}

# Attributes of a Trainer that must be false or None, and why.
REFUSED = {
    "is_deepspeed_enabled": "how DeepSpeed scales gradients was never tried",
    "args.neftune_noise_alpha": "its noise depends on the rank's rows",
    "args.accelerator_config.dispatch_batches": "accelerate deals the batches to all ranks",
}


def split_sequence(trainer_class: Any) -> Any:
    """Makes a Trainer subclass that splits each sequence over the ranks of `register`'s group.

    The constructor takes the same arguments. All ranks of a group get the same batches, which is
    checked before each step.

    Args:
        trainer_class: `transformers.Trainer`, `trl.SFTTrainer` or a subclass of either, for causal
            language models with a registered `attn_implementation`.

    Returns:
        The class. Its constructor raises ValueError if the model has another attention
        implementation, the group is not consecutive ranks or does not divide their number, or
        accelerate's context parallelism is on; and NotImplementedError for options that would give
        wrong results: NEFTune, DeepSpeed, accelerate's tensor parallelism, and losses of a model or
        of an overridden compute_loss other than transformers' causal one, which the first step
        compares with the cross-entropy of its logits.

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
            "call it before the trainer is made: split_sequence(Trainer)(model=model, ...)"
        )
    for ancestor in trainer_class.__mro__:
        if ancestor.__module__.startswith("trl.") and ancestor.__name__ not in TRL:
            raise NotImplementedError(
                f"{ancestor.__name__} computes a loss of several texts together: of TRL's trainers "
                "only SFTTrainer works on split sequences"
            )
    if issubclass(trainer_class, _SplitSequence):
        return trainer_class
    return type(f"SplitSequence{trainer_class.__name__}", (_SplitSequence, trainer_class), {})


_Trainer: Any = object


class _SplitSequence(_Trainer):
    """Methods that precede the Trainer's in the method resolution order."""

    preprocess_logits_for_metrics: Any
    label_smoother: Any
    compute_loss_func: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        from transformers import TrainerCallback
        from transformers.integrations.liger import apply_liger_kernel

        super().__init__(*args, **kwargs)
        _check_trainer(self)
        self._ring = _Ring.of(self)
        _keep_gradients(self.model)
        # Every rank reads an iterable dataset: accelerate would deal its batches to all ranks.
        self.accelerator.dataloader_config.dispatch_batches = False
        # TRL sums its figures over all ranks; gather_for_metrics would drop ranks without their own
        # sample in the last batch.
        self.accelerator.gather_for_metrics = self.accelerator.gather
        if self.args.use_liger_kernel:  # the Trainer does so in train(), too late for evaluate()
            apply_liger_kernel(self.model, self.args.liger_kernel_config)
        smoother = self.label_smoother
        if smoother is not None:  # labels are shifted before they are cut
            self.label_smoother = lambda outputs, labels, shift_labels, **options: smoother(
                outputs, labels, **options
            )
        self._loss_checked: set[bool] = set()
        self._preprocess: Any = None  # during an evaluation
        # On NCCL an error of a call comes later: before the optimizer uses the gradients.
        group = self._ring.group
        look = {"on_pre_optimizer_step": lambda *_args, **_kwargs: check_pending(group)}
        self.add_callback(type("ChecksCalls", (TrainerCallback,), look))

    def train(self, *args: Any, **kwargs: Any) -> Any:
        from torch.distributed.fsdp import FSDPModule

        _keep_gradients(self.model)
        # An earlier evaluation sets a mark that would keep accelerate from wrapping with DDP.
        if self.model_wrapped is self.model and not self.is_fsdp_enabled:
            self.model._is_accelerate_prepared = False
        # It also leaves parameters unsharded; the optimizer would update these, not FSDP2's shards.
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
        return super().train(*args, **kwargs)

    def get_cp_size(self) -> int:
        """Number of ranks with the same batch."""
        return self._ring.size

    def _get_dataloader(self, *args: Any, **kwargs: Any) -> Any:
        """The loader of training, evaluation and prediction."""
        with self._ring.data_parallel(self.accelerator):
            return super()._get_dataloader(*args, **kwargs)

    def _get_num_items_in_batch(
        self, batch_samples: Sequence[Mapping[str, Any]], device: torch.device
    ) -> Tensor | None:
        """Number of targets in the batches of all groups; refuses differences within a group."""
        count = torch.zeros((), dtype=torch.int64, device=device)
        for batch in batch_samples:
            count += num_targets(batch).to(device)
        of_rank = torch.stack([count, fingerprint(batch_samples, device)])
        counts, fingerprints = self.accelerator.gather(of_rank).view(-1, 2).T.tolist()
        self._ring.check_same(fingerprints)
        if not batch_samples:
            return None
        return torch.tensor(sum(counts[:: self._ring.size]), device=device)

    def compute_loss(
        self,
        model: Any,
        inputs: Mapping[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        """The Trainer's loss for this rank's rows; `inputs` have all rows of the batch."""
        set_step(self.state.global_step)
        if num_items_in_batch is None:  # TRL's evaluation leaves it out
            num_items_in_batch = self._get_num_items_in_batch([inputs], self.args.device)
        part = self._ring.cut(inputs)
        given = self.compute_loss_func
        if given is not None:
            self.compute_loss_func = partial(self._ring.whole_loss, given, inputs)
            try:
                return super().compute_loss(model, part, return_outputs, num_items_in_batch)
            finally:
                self.compute_loss_func = given
        if model.training in self._loss_checked:
            return super().compute_loss(model, part, return_outputs, num_items_in_batch)
        self._loss_checked.add(model.training)
        targets, rows = part["shift_labels"], {k: x for k, x in part.items() if k != "labels"}
        with _outputs(model) as outputs:
            result = super().compute_loss(model, part, return_outputs, num_items_in_batch)
            if self.args.use_liger_kernel and getattr(outputs[0], "logits", None) is None:
                with torch.no_grad():  # Liger's loss in training leaves the logits out
                    outputs[0] = model(**{**rows, "skip_logits": False})
        loss = result[0] if return_outputs else result
        _check_loss(self, loss, outputs, targets, num_items_in_batch)
        return result

    def prediction_step(
        self,
        model: Any,
        inputs: Mapping[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[Tensor, Any, Any]:
        """Loss and predictions of a batch, rows in their order, the same on a group's ranks."""
        num_targets(inputs)
        inputs = self._prepare_inputs(inputs)
        loss, found, labels = super().prediction_step(
            model, inputs, prediction_loss_only, ignore_keys
        )
        dist.all_reduce(loss, group=self._ring.group)
        loss = loss / self._ring.size
        if prediction_loss_only:
            return loss, None, None
        return loss, self._ring.predictions(found, inputs, self._preprocess), labels

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        self.gather_function = self._gather_once
        # Called in `prediction_step`: what it makes of a rank's rows is small, unlike all logits.
        given, self.preprocess_logits_for_metrics = self.preprocess_logits_for_metrics, None
        self._preprocess = given
        try:
            return super().evaluation_loop(*args, **kwargs)
        finally:
            self.preprocess_logits_for_metrics, self._preprocess = given, None

    def _gather_once(self, x: Any) -> Any:
        """Like accelerate's gather_for_metrics, but takes each group's samples once."""
        if isinstance(x, tuple | list):
            return type(x)(map(self._gather_once, x))
        gathered = self.accelerator.gather(x.contiguous())
        once = gathered.view(-1, self._ring.size, *x.shape)[:, 0].flatten(0, 1)
        state = self.accelerator.gradient_state
        return once[: state.remainder] if state.end_of_dataloader and state.remainder > 0 else once

    def floating_point_ops(self, inputs: Mapping[str, Any]) -> int:
        """This rank's share of the batch's FLOPs."""
        return super().floating_point_ops(inputs) // self._ring.size


@dataclass(frozen=True)
class _Ring:
    """This rank's group, which splits a sequence, and the mesh of all ranks."""

    group: dist.ProcessGroup
    rank: int
    size: int
    layout: str
    mesh: DeviceMesh

    @staticmethod
    def of(trainer: Any) -> _Ring:
        registered = _registration(trainer.model)
        group = groups.check_group(registered.group)
        ranks, world_size = dist.get_process_group_ranks(group), dist.get_world_size()
        size, first = len(ranks), dist.get_rank() // len(ranks) * len(ranks)
        if world_size % size or ranks != list(range(first, first + size)):
            raise ValueError(
                f"the group of register() must be consecutive ranks of {world_size} and divide "
                f"them, got {ranks}: make a mesh with the sequence in its last axis, "
                "init_device_mesh(device, (dp, cp)), and register(group=mesh['cp'])"
            )
        # By these axis names accelerate's data loader gives the ranks of "cp" the same batches.
        mesh = init_device_mesh(
            trainer.accelerator.device.type,
            (world_size // size, size),
            mesh_dim_names=("dp_replicate", "cp"),
        )
        return _Ring(group, dist.get_rank(group), size, registered.layout, mesh)

    @contextmanager
    def data_parallel(self, accelerator: Any) -> Iterator[None]:
        """A context in which accelerate makes data loaders that give each group its batches."""
        state = accelerator.state
        before, state.device_mesh = state.device_mesh, self.mesh
        try:
            yield
        finally:
            state.device_mesh = before

    def check_same(self, fingerprints: list[int]) -> None:
        """Raises on every rank if batches differ within a group."""
        for rank, got in enumerate(fingerprints):
            first = rank // self.size * self.size
            if got != fingerprints[first]:
                raise ValueError(
                    f"ranks {first} and {rank} split the same sequences, but got other batches: "
                    "what a dataset, sampler or collator draws at random must be the same on both"
                )

    def layout_of(self, rows: dict[str, Tensor]) -> SequenceLayout:
        return SequenceLayout.from_name(self.layout, tokens_of(rows).size(1), self.size)

    def cut(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        rows, others, _ = as_documents(inputs)
        seqlen, layout = tokens_of(rows).size(1), self.layout_of(rows)
        if 0 in layout.shard_lens:  # transformers' models need a row
            raise ValueError(
                f"a batch of {seqlen} tokens leaves some of {self.size} ranks without any: give "
                "batches of more or longer sequences"
            )
        part: dict[str, Any] = shard_batch(rows, layout, self.rank)
        # The model computes a loss only with labels, but from shift_labels.
        return {**part, **others, "labels": part["shift_labels"], LAYOUT: layout}

    def whole_loss(
        self, function: Any, inputs: Mapping[str, Any], outputs: Any, _: Any, **options: Any
    ) -> Tensor:
        """This rank's share of a user's loss of the whole batch, which every rank computes alike.

        The ranks' gradients add up to the loss's, as do the values.
        """
        documents = as_documents(inputs)
        layout = self.layout_of(documents.rows)
        logits = documents.batch(whole_rows(outputs.logits, layout, self.rank, self.group))
        loss = function(type(outputs)(logits=logits), inputs.get("labels"), **options)
        return loss - loss.detach() * (1 - 1 / self.size)

    def predictions(self, found: Any, inputs: Mapping[str, Any], preprocess: Any) -> Any:
        """The model's outputs for this rank's rows, of the whole batch, (batch, columns, ...).

        `preprocess` is the Trainer's function of logits and labels, and gets this rank's rows.
        """
        documents = as_documents(inputs)
        layout = self.layout_of(documents.rows)
        if preprocess is not None:
            labels = inputs["labels"][documents.kept][None]
            found = preprocess(found, layout.shard(labels, self.rank))

        def whole(x: Any) -> Any:
            if isinstance(x, tuple | list):
                return type(x)(map(whole, x))
            shape = tuple(getattr(x, "shape", ()))
            if shape[:2] != (1, layout.shard_len(self.rank)):
                raise NotImplementedError(
                    "predictions must have a row for each token, (1, rows, ...), as they are "
                    f"gathered from ranks, got shape {shape}: leave others out by "
                    "preprocess_logits_for_metrics, or by ignore_keys"
                )
            return documents.batch(unshard(x, layout, group=self.group))

        return whole(found)


@contextmanager
def _outputs(model: Any) -> Iterator[list[Any]]:
    """A context that collects the outputs of the model's forwards."""
    outputs: list[Any] = []
    handle = model.register_forward_hook(lambda _model, _args, output: outputs.append(output))
    try:
        yield outputs
    finally:
        handle.remove()


def _check_loss(
    trainer: Any, loss: Tensor, outputs: Sequence[Any], targets: Tensor, num_items: Tensor
) -> None:
    """Refuses a loss that is not the cross-entropy of this rank's rows, divided by all targets.

    A loss that is computed otherwise, by the model or by an overridden `compute_loss`, would shift
    labels that are shifted already, or divide by this rank's rows.
    """
    got, expected = float(loss.detach()), float("nan")
    smoothing = trainer.args.label_smoothing_factor
    terms = _terms(outputs[0], targets, smoothing) if outputs else None
    if terms is not None:
        if getattr(trainer.args, "loss_type", "nll") == "dft":
            terms = terms * torch.exp(-terms)
        ranks = trainer.accelerator.num_processes // trainer.get_tp_size()
        expected = float(terms.double().sum() / num_items * ranks)
    # Equal float32 terms, which the loss adds in float32, by blocks.
    if not abs(got - expected) <= 64 * torch.finfo(torch.float32).eps * abs(expected):
        with reporting(trainer._ring.group):
            raise NotImplementedError(
                f"the loss of this rank's rows is {got:.6g}, but the cross-entropy of their logits "
                f"is {expected:.6g}: only transformers' causal loss can be split, not a loss of "
                f"the model's forward ({type(trainer.model).__name__}) or an overridden "
                f"compute_loss ({type(trainer).__name__}) that shifts labels, divides or adds "
                "terms itself"
            )


def _terms(output: Any, targets: Tensor, smoothing: float) -> Tensor | None:
    """The cross-entropy of each of this rank's rows; None if the output does not tell it."""
    if isinstance(getattr(output, "log_probs", None), Tensor):  # TRL's, without logits
        return -output.log_probs.detach()
    logits = getattr(output, "logits", None)
    if not isinstance(logits, Tensor) or logits.shape[:2] != targets.shape:
        return None
    # In parts, since float32 copies of all logits may not fit in memory.
    parts = zip(logits.detach()[0].split(1024), targets[0].split(1024), strict=True)
    of = partial(cross_entropy, reduction="none", label_smoothing=smoothing)
    return torch.cat([of(x.float(), y) for x, y in parts])


def _keep_gradients(model: Any) -> None:
    """Keeps bitsandbytes' 4-bit layers in a layout of which gradients can be computed.

    On CPUs with AVX512-BF16 an evaluation turns their weights into a layout for inference, whose
    products torch's autograd does not see: training would go on without most gradients.
    """
    for name, module in model.named_modules():
        if getattr(module, "support_avx512bf16_for_cpu", False):
            module.support_avx512bf16_for_cpu = False
        state = getattr(getattr(module, "weight", None), "quant_state", None)
        if getattr(state, "packing_format_for_cpu", False):
            raise ValueError(
                f"{name} holds bitsandbytes' layout for inference on CPUs, which has no gradients: "
                "the model was evaluated before this trainer was made; load it again"
            )


def _registration(model: Any) -> Registration:
    from transformers import AttentionInterface

    name = model.config.get_text_config()._attn_implementation
    attend = AttentionInterface._global_mapping.get(name)
    registered = getattr(attend, "__self__", None)
    if not isinstance(registered, Registration):
        raise ValueError(
            f"model has attn_implementation {name!r}, not one of "
            "ring_attn.integrations.transformers.register: register() first, then load the model "
            "with attn_implementation='ring_attn'"
        )
    return registered


def _check_trainer(trainer: Any) -> None:
    args, accelerator = trainer.args, trainer.accelerator
    parallel = accelerator.parallelism_config
    if parallel is not None and (parallel.cp_enabled or parallel.sp_enabled):
        raise ValueError(
            f"parallelism_config has cp_size={parallel.cp_size} and sp_size={parallel.sp_size}: "
            "leave both at 1, as the group of register() splits the sequences"
        )
    loss = getattr(getattr(trainer.model, "loss_function", None), "__name__", None)
    if loss != "ForCausalLMLoss" or not trainer.model_accepts_loss_kwargs:
        raise NotImplementedError(
            f"the loss of {type(trainer.model).__name__} is {loss}: only models with "
            "ForCausalLMLoss, which divides by num_items_in_batch, are trained on split sequences"
        )
    wrong = {name: why for name, why in REFUSED.items() if attrgetter(name)(trainer)}
    if args.include_num_input_tokens_seen not in (False, "no"):
        wrong["include_num_input_tokens_seen"] = "each rank of a group would count the whole batch"
    if getattr(args, "train_sampling_strategy", None) == "batch_rebalance":
        wrong["batch_rebalance"] = "its sampler gives each rank other batches"
    if args.world_size > 1 and not args.average_tokens_across_devices:
        wrong["average_tokens_across_devices=False"] = "each rank would divide by its own labels"
    if parallel is not None and parallel.tp_enabled:
        wrong["tp_size"] = "ranks of a tensor-parallel group have the same rows"
    if args.use_liger_kernel and (args.label_smoothing_factor or trainer.compute_loss_func):
        wrong["use_liger_kernel"] = "its models give no logits, of which this loss is computed"
    for name, why in wrong.items():
        raise NotImplementedError(f"{name} does not go with a split sequence: {why}; leave it out")
