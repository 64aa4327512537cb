"""Tiny transformers of diffusers, and what becomes of them on a split sequence.

    torchrun --nproc-per-node 2 -m tests.diffusers_models docs/diffusers_models.md

writes the table of the documentation.
"""

from __future__ import annotations

import copy
import dataclasses
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import diffusers
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ring_attn.integrations.diffusers import parallelize
from ring_attn.testing import check_rounded, noisy_runs
from tests.hf_models import all_in_float64

BATCH, TEXT = 2, 5
# Prompts of the two batch entries have 5 and 3 tokens.
PADDED = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])

Inputs = Callable[[Callable[..., Tensor]], dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class Tiny:
    """Arguments of a tiny model of a class, and a function that makes its inputs.

    The function gets `randn`, which draws tensors.
    """

    config: dict[str, Any]
    inputs: Inputs


def _grid(frames: int, height: int, width: int, axes: int) -> Tensor:
    """Return the ids of all positions of a video, (positions, axes)."""
    ids = torch.cartesian_prod(*(torch.arange(n) for n in (frames, height, width)))
    return torch.nn.functional.pad(ids, (0, axes - 3)).double()


def _timestep() -> Tensor:
    return torch.tensor([300.0, 700.0])


def _flux(randn: Callable[..., Tensor]) -> dict[str, Any]:
    return {
        "hidden_states": randn(BATCH, 15, 4),
        "encoder_hidden_states": randn(BATCH, TEXT, 32),
        "pooled_projections": randn(BATCH, 32),
        "timestep": _timestep() / 1000,
        "img_ids": _grid(1, 3, 5, 3),
        "txt_ids": torch.zeros(TEXT, 3),
    }


def _chroma(randn: Callable[..., Tensor]) -> dict[str, Any]:
    inputs = _flux(randn)
    del inputs["pooled_projections"]
    return inputs


def _flux2(randn: Callable[..., Tensor]) -> dict[str, Any]:
    return {
        "hidden_states": randn(BATCH, 15, 4),
        "encoder_hidden_states": randn(BATCH, TEXT, 32),
        "timestep": _timestep() / 1000,
        "img_ids": _grid(1, 3, 5, 4),
        "txt_ids": torch.zeros(TEXT, 4),
        "guidance": torch.tensor([3.0, 3.0]),
    }


def _sd3(randn: Callable[..., Tensor]) -> dict[str, Any]:
    return {
        "hidden_states": randn(BATCH, 4, 3, 5),
        "encoder_hidden_states": randn(BATCH, TEXT, 32),
        "pooled_projections": randn(BATCH, 64),
        "timestep": _timestep(),
    }


def _wan(randn: Callable[..., Tensor]) -> dict[str, Any]:
    return {
        "hidden_states": randn(BATCH, 4, 3, 6, 6),
        "encoder_hidden_states": randn(BATCH, 14, 16),  # as many as rank 0's rows of 27
        "timestep": _timestep(),
    }


def _hunyuan_video(randn: Callable[..., Tensor]) -> dict[str, Any]:
    return {
        "hidden_states": randn(BATCH, 4, 3, 3, 3),
        "timestep": _timestep(),
        "encoder_hidden_states": randn(BATCH, TEXT, 16),
        "encoder_attention_mask": PADDED,
        "pooled_projections": randn(BATCH, 8),
        "guidance": torch.tensor([3.0, 3.0]),
    }


def _ltx(randn: Callable[..., Tensor]) -> dict[str, Any]:
    return {
        "hidden_states": randn(BATCH, 27, 8),
        "encoder_hidden_states": randn(BATCH, TEXT, 32),
        "timestep": _timestep(),
        "encoder_attention_mask": PADDED,
        "num_frames": 3,
        "height": 3,
        "width": 3,
    }


def _cogvideox(randn: Callable[..., Tensor]) -> dict[str, Any]:
    return {
        "hidden_states": randn(BATCH, 3, 4, 6, 6),
        "encoder_hidden_states": randn(BATCH, TEXT, 8),
        "timestep": _timestep(),
        "image_rotary_emb": (randn(27, 16).sin(), randn(27, 16).cos()),
    }


def _qwen(randn: Callable[..., Tensor]) -> dict[str, Any]:
    return {
        "hidden_states": randn(BATCH, 15, 16),
        "encoder_hidden_states": randn(BATCH, TEXT, 16),
        "encoder_hidden_states_mask": PADDED,
        "timestep": _timestep() / 1000,
        "img_shapes": [(1, 3, 5)] * BATCH,
    }


def _mochi(randn: Callable[..., Tensor]) -> dict[str, Any]:
    return {
        "hidden_states": randn(BATCH, 12, 3, 6, 6),
        "encoder_hidden_states": randn(BATCH, TEXT, 16),
        "timestep": _timestep(),
        "encoder_attention_mask": PADDED.bool(),
    }


def _cosmos(randn: Callable[..., Tensor]) -> dict[str, Any]:
    return {
        "hidden_states": randn(BATCH, 4, 1, 6, 10),
        "timestep": _timestep(),
        "encoder_hidden_states": randn(BATCH, TEXT, 16),
    }


def _pixart(randn: Callable[..., Tensor]) -> dict[str, Any]:
    return {
        "hidden_states": randn(BATCH, 4, 6, 6),
        "timestep": _timestep(),
        "encoder_hidden_states": randn(BATCH, TEXT, 8),
        "encoder_attention_mask": PADDED,
        "added_cond_kwargs": {"aspect_ratio": None, "resolution": None},
    }


def _z_image(randn: Callable[..., Tensor]) -> dict[str, Any]:
    return {
        "x": [randn(16, 1, 6, 6), randn(16, 1, 6, 6)],
        "t": _timestep() / 1000,
        "cap_feats": [randn(TEXT, 16), randn(TEXT - 2, 16)],
    }


_FLUX = {
    "patch_size": 1,
    "in_channels": 4,
    "num_layers": 1,
    "num_single_layers": 1,
    "attention_head_dim": 16,
    "num_attention_heads": 2,
    "joint_attention_dim": 32,
}

TINY: dict[str, Tiny] = {
    "FluxTransformer2DModel": Tiny(
        _FLUX | {"pooled_projection_dim": 32, "axes_dims_rope": [4, 4, 8]}, _flux
    ),
    "Flux2Transformer2DModel": Tiny(
        _FLUX | {"axes_dims_rope": [4, 4, 4, 4], "timestep_guidance_channels": 32}, _flux2
    ),
    "ChromaTransformer2DModel": Tiny(
        _FLUX
        | {
            "axes_dims_rope": [4, 4, 8],
            "approximator_num_channels": 8,
            "approximator_hidden_dim": 16,
            "approximator_layers": 1,
        },
        _chroma,
    ),
    "SD3Transformer2DModel": Tiny(
        {
            "sample_size": 32,
            "patch_size": 1,
            "in_channels": 4,
            "num_layers": 2,
            "attention_head_dim": 8,
            "num_attention_heads": 4,
            "caption_projection_dim": 32,
            "joint_attention_dim": 32,
            "pooled_projection_dim": 64,
            "out_channels": 4,
            "dual_attention_layers": (0,),
        },
        _sd3,
    ),
    "WanTransformer3DModel": Tiny(
        {
            "patch_size": (1, 2, 2),
            "num_attention_heads": 2,
            "attention_head_dim": 12,
            "in_channels": 4,
            "out_channels": 4,
            "text_dim": 16,
            "freq_dim": 64,
            "ffn_dim": 32,
            "num_layers": 2,
            "rope_max_seq_len": 32,
        },
        _wan,
    ),
    "HunyuanVideoTransformer3DModel": Tiny(
        {
            "in_channels": 4,
            "out_channels": 4,
            "num_attention_heads": 2,
            "attention_head_dim": 10,
            "num_layers": 1,
            "num_single_layers": 1,
            "num_refiner_layers": 1,
            "patch_size": 1,
            "patch_size_t": 1,
            "guidance_embeds": True,
            "text_embed_dim": 16,
            "pooled_projection_dim": 8,
            "rope_axes_dim": (2, 4, 4),
        },
        _hunyuan_video,
    ),
    "LTXVideoTransformer3DModel": Tiny(
        {
            "in_channels": 8,
            "out_channels": 8,
            "num_attention_heads": 2,
            "attention_head_dim": 16,
            "cross_attention_dim": 32,
            "num_layers": 2,
            "caption_channels": 32,
        },
        _ltx,
    ),
    "CogVideoXTransformer3DModel": Tiny(
        {
            "num_attention_heads": 2,
            "attention_head_dim": 16,
            "in_channels": 4,
            "out_channels": 4,
            "time_embed_dim": 2,
            "text_embed_dim": 8,
            "num_layers": 2,
            "use_rotary_positional_embeddings": True,
        },
        _cogvideox,
    ),
    "QwenImageTransformer2DModel": Tiny(
        {
            "patch_size": 2,
            "in_channels": 16,
            "out_channels": 4,
            "num_layers": 2,
            "attention_head_dim": 16,
            "num_attention_heads": 2,
            "joint_attention_dim": 16,
            "axes_dims_rope": (8, 4, 4),
        },
        _qwen,
    ),
    "MochiTransformer3DModel": Tiny(
        {
            "patch_size": 2,
            "num_attention_heads": 2,
            "attention_head_dim": 8,
            "num_layers": 2,
            "pooled_projection_dim": 16,
            "in_channels": 12,
            "text_embed_dim": 16,
            "time_embed_dim": 4,
            "max_sequence_length": 16,
        },
        _mochi,
    ),
    "CosmosTransformer3DModel": Tiny(
        {
            "in_channels": 4,
            "out_channels": 4,
            "num_attention_heads": 2,
            "attention_head_dim": 16,
            "num_layers": 2,
            "mlp_ratio": 2,
            "text_embed_dim": 16,
            "adaln_lora_dim": 4,
            "max_size": (4, 32, 32),
            "concat_padding_mask": False,  # resized by torchvision
            "patch_size": (1, 2, 2),
        },
        _cosmos,
    ),
    "ZImageTransformer2DModel": Tiny(
        {
            "in_channels": 16,
            "dim": 32,
            "n_layers": 2,
            "n_refiner_layers": 1,
            "n_heads": 2,
            "n_kv_heads": 2,
            "cap_feat_dim": 16,
            "axes_dims": [8, 4, 4],
            "axes_lens": [128, 32, 32],
        },
        _z_image,
    ),
    "PixArtTransformer2DModel": Tiny(
        {
            "num_layers": 2,
            "patch_size": 2,
            "attention_head_dim": 8,
            "num_attention_heads": 2,
            "in_channels": 4,
            "cross_attention_dim": 16,
            "caption_channels": 8,
            "out_channels": 8,
            "sample_size": 8,
            "use_additional_conditions": False,
        },
        _pixart,
    ),
}


def classes() -> list[str]:
    """Return the names of the transformers for images and videos that diffusers exports."""
    names = (name for name in dir(diffusers) if name.endswith(("2DModel", "3DModel")))
    return sorted(name for name in names if "Transformer" in name)


def make(name: str) -> nn.Module:
    """Return a tiny model with the same random weights each time, none of which is zero."""
    torch.manual_seed(0)
    model: nn.Module = getattr(diffusers, name)(**TINY[name].config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.2)
    return model.eval()


def inputs_of(name: str, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """Return the same random inputs each time."""
    generator = torch.Generator().manual_seed(1)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).float()

    def as_dtype(x: Any) -> Any:
        if isinstance(x, Tensor) and x.is_floating_point():
            return x.to(dtype)
        return type(x)(map(as_dtype, x)) if isinstance(x, (tuple, list)) else x

    return {key: as_dtype(x) for key, x in TINY[name].inputs(randn).items()}


def run(model: nn.Module, inputs: dict[str, Any]) -> dict[str, Tensor]:
    """Return the sample, and the gradients of all parameters of a weighted sum of it."""
    model.zero_grad()
    sample = model(**inputs, return_dict=False)[0]
    if isinstance(sample, list):  # one for each batch entry
        sample = torch.stack(sample)
    weights = torch.randn(sample.shape, generator=torch.Generator().manual_seed(2))
    (sample * weights.to(sample.dtype)).sum().backward()
    gradients = {
        f"gradient of {name}": p.grad.clone()
        for name, p in model.named_parameters()
        if p.grad is not None
    }
    return {"sample": sample.detach(), **gradients}


def compared(name: str, group: dist.ProcessGroup, **options: Any) -> list[str]:
    """Return what differs on this rank from one process by more than rounding."""
    model, inputs = make(name), inputs_of(name)
    with all_in_float64():
        oracle = run(copy.deepcopy(model).double(), inputs_of(name, torch.float64))
    noisy = noisy_runs(lambda: run(model, inputs))
    handle = parallelize(model, group, **options)
    got = run(model, inputs)
    handle.remove()
    wrong = [] if got.keys() == oracle.keys() else ["parameters without gradients"]
    for key in sorted(got.keys() & oracle.keys()):
        if key != "sample":
            dist.all_reduce(got[key], group=group)
        if not check_rounded(key, got[key], oracle[key], [x[key] for x in noisy]).ok:
            wrong.append(key)
    return sorted(wrong)


def outcome(name: str) -> str:
    """Return what becomes of a class on all ranks: "right", "refused", "WRONG", ..."""
    if name not in TINY:
        try:
            parallelize(type(name, (nn.Module,), {})())
        except NotImplementedError as error:
            return "refused: " + str(error).partition(":")[0].replace(name, "it")
    group = dist.new_group()
    try:
        wrong = compared(name, group)
    except (NotImplementedError, ValueError) as error:
        return "refused: " + str(error).partition(": ")[0].replace(name, "it")
    finally:
        dist.destroy_process_group(group)
    of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, wrong)
    return "right" if not any(of_ranks) else f"WRONG: {of_ranks}"


def table(outcomes: dict[str, str]) -> Iterator[str]:
    """Yield the lines of docs/diffusers_models.md."""
    yield f"""# Transformers of diffusers on split sequences

Made by `tests/diffusers_models.py` with diffusers {diffusers.__version__}: a tiny random model of
each class on 2 ranks, forward and backward.

- right: the sample, and the gradients of all parameters summed over the ranks, are those of one
  process, within the bound of the tests
- refused: an error names the class and the reason

| model | on a split sequence |
|---|---|"""
    for name, word in outcomes.items():
        yield f"| {name} | {word} |"
    yield ""


def main(path: str) -> None:
    diffusers.utils.logging.set_verbosity_error()
    dist.init_process_group("gloo")
    outcomes = {name: outcome(name) for name in classes()}
    if dist.get_rank() == 0:
        Path(path).write_text("\n".join(table(outcomes)))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
