"""The choice of a backend: why a backend is refused, and which backend "auto" takes."""

import re
from collections.abc import Callable, Iterator, Mapping

import pytest
import torch

from ring_attn.backends import (
    Purpose,
    backend_elsewhere,
    base,
    choose_backend,
    flash_attn,
    get_backend,
)
from ring_attn.backends.rates import GLUON_HEADDIMS, ONE_PASS_HEADDIMS, RATES
from ring_attn.core.spec import AttentionSpec
from ring_attn.kernels import configs
from ring_attn.kernels.gluon_guard import gluon_missing
from ring_attn.planning.devices import builtin_cluster, with_backend
from tests.kernels.calls import needs_sm_100


def spec_of(
    device: str = "cpu",
    dtype: torch.dtype = torch.bfloat16,
    headdim: int = 64,
    headdim_v: int = 64,
    softcap: float = 0.0,
) -> AttentionSpec:
    return AttentionSpec(device, dtype, 1, 4, 2, headdim, headdim_v, softcap)


Pretend = Callable[..., None]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pretend]:
    """Simulates a GPU of a compute capability, packages of given versions, and cuDNN."""
    gluon_missing()  # Gluon can be imported only with TRITON_INTERPRET as it was for triton.

    def pretend(
        capability: tuple[int, int], installed: Mapping[str, str | None], cudnn: bool = True
    ) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
        monkeypatch.setattr(base, "gpu_model", lambda: "a GPU")
        monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: cudnn)
        monkeypatch.setattr(flash_attn, "installed_version", installed.get)
        monkeypatch.delenv("TRITON_INTERPRET", raising=False)
        choose_backend.cache_clear()

    yield pretend
    choose_backend.cache_clear()


INSTALLED = {"flash-attn": "2.8.3.post2", "flash-attn-3": "3.0.0", "flash-attn-4": "4.0.0b22"}


@pytest.mark.parametrize(
    ("name", "spec", "installed", "reason"),
    [
        ("aten", spec_of("cuda", headdim=256), {}, None),
        ("aten", spec_of("cuda", torch.float32), {}, "got torch.float32"),
        ("aten", spec_of("cuda", headdim_v=300), {}, "at most 256, got 300"),
        ("cudnn", spec_of("cuda", torch.float16, 128, 128), {}, None),
        ("cudnn", spec_of("cuda"), {"cudnn": None}, "no cuDNN"),
        ("cudnn", spec_of("cuda", torch.float32), {}, "float16 and bfloat16"),
        ("cudnn", spec_of("cuda", headdim=136), {}, "up to 128, got 136"),
        ("flash_attn", spec_of("cuda", softcap=30.0), {}, None),
        ("flash_attn", spec_of("cuda"), {"flash-attn": "2.7.4.post1"}, "2.8.0, got 2.7.4.post1"),
        ("flash_attn", spec_of("cuda"), {"flash-attn": "2.8.3.post2+cu12torch2.8"}, None),
        ("flash_attn", spec_of("cuda", torch.float32), {}, "got torch.float32"),
        ("flash_attn", spec_of("cuda", headdim=264), {}, "up to 256, got 264"),
        ("flash_attn_3", spec_of("cuda", headdim=192, softcap=30.0), {}, None),
        ("flash_attn_3", spec_of("cuda", headdim=200), {}, "up to 192, got 200"),
        ("flash_attn_3", spec_of("cuda"), {"flash-attn-3": "3.0.0b1"}, "3.0.0, got 3.0.0b1"),
        ("flash_attn_4", spec_of("cuda", headdim_v=136), {}, "up to 128, got 136"),
        ("flash_attn_4", spec_of("cuda"), {"flash-attn-4": "4.0.0b12"}, "4.0.0b13, got 4.0.0b12"),
        ("flash_attn_4", spec_of("cuda"), {"flash-attn-4": "4.0.0b13"}, None),
    ],
)
def test_supports_says_why_not(
    name: str,
    spec: AttentionSpec,
    installed: dict[str, str | None],
    reason: str | None,
    gpu: Pretend,
) -> None:
    """Simulates a Hopper GPU; everything is installed unless `installed` differs."""
    gpu((9, 0), INSTALLED | installed, "cudnn" not in installed)
    got = get_backend(name).supports(spec)
    assert got is None if reason is None else reason in str(got)


TRAINING = Purpose(backward=True)
UNSURE = Purpose(backward=True, same_bits=False)
FLASH = tuple(INSTALLED)


@pytest.mark.parametrize(
    ("gpu_of", "installed", "purpose", "spec", "expected"),
    [
        # Steps merged: FA3 570, ours 545, cuDNN 532, our portable forward 376, FA2 339 TFLOP/s.
        ((9, 0), (), Purpose(), spec_of("cuda"), "triton"),
        ((9, 0), (), Purpose(), spec_of("cuda", headdim=96, headdim_v=96), "cudnn"),
        ((9, 0), FLASH, Purpose(), spec_of("cuda"), "flash_attn_3"),
        # Two backward runs must be bit-equal: without flash-attn 3, only Triton's are.
        ((9, 0), ("flash-attn",), TRAINING, spec_of("cuda"), "triton"),
        ((9, 0), FLASH, TRAINING, spec_of("cuda"), "flash_attn_3"),
        ((9, 0), (), UNSURE, spec_of("cuda"), "cudnn"),
        ((9, 0), FLASH, TRAINING._replace(same_bits=True), spec_of("cuda"), "triton"),
        # cuDNN leaves windows to torch's flash; documents are many tiles; memory bounds decoding.
        ((9, 0), (), Purpose(window=True), spec_of("cuda"), "triton"),
        ((9, 0), FLASH, Purpose(several=True), spec_of("cuda"), "triton"),
        ((9, 0), FLASH, Purpose(decoding=True), spec_of("cuda"), "triton"),
        # Calls that the fastest refuse.
        ((9, 0), FLASH[:1], Purpose(), spec_of("cuda", softcap=30.0), "triton"),
        ((9, 0), (), Purpose(), spec_of("cuda", headdim=256), "triton"),
        ((9, 0), FLASH, TRAINING, spec_of("cuda", headdim=512), "reference"),
        # Other architectures; without rates, the order of preference. On an A100, in a fixed order,
        # ours is faster than flash-attn, 144 to 122 by estimate; in any order torch's is faster.
        ((8, 0), FLASH, TRAINING, spec_of("cuda"), "triton"),
        ((8, 0), (), UNSURE, spec_of("cuda"), "aten"),
        ((10, 0), FLASH, TRAINING, spec_of("cuda"), "flash_attn_4"),
        pytest.param((10, 0), (), TRAINING, spec_of("cuda"), "triton", marks=needs_sm_100),
        ((8, 6), FLASH, Purpose(), spec_of("cuda"), "triton"),
        ((7, 5), (), TRAINING, spec_of("cuda"), "aten"),
        ((9, 0), FLASH, UNSURE, spec_of("cpu", torch.float64), "aten"),
        ((9, 0), FLASH, TRAINING, spec_of("cpu", softcap=30.0), "reference"),
    ],
)
def test_auto_takes_the_fastest_that_can(
    gpu_of: tuple[int, int],
    installed: tuple[str, ...],
    purpose: Purpose,
    spec: AttentionSpec,
    expected: str,
    gpu: Pretend,
) -> None:
    gpu(gpu_of, {name: INSTALLED[name] for name in installed})
    choice = choose_backend(spec, purpose=purpose)
    assert choice.name == expected, choice
    assert choice.reasons[expected] is None
    if choice.tflops:
        assert choice.tflops[expected] == max(choice.tflops.values())
        rated = RATES[f"sm_{gpu_of[0]}{gpu_of[1]}"]
        can = {name for name, reason in choice.reasons.items() if reason is None} & {*rated}
        why = re.sub("triton runs its portable kernels, because [^;]*", "", choice.why)
        left_out = {name for name in can if re.search(rf"\b{name}\b", why)}
        assert {*choice.tflops} == can - left_out


def test_why_says_what_was_compared_and_what_was_left_out(gpu: Pretend) -> None:
    gpu((9, 0), {})
    choice = choose_backend(spec_of("cuda"))
    assert choice.why == "the fastest forward on sm_90 by published rates and estimates"
    assert list(choice.tflops) == ["triton", "aten", "cudnn"]
    choice = choose_backend(spec_of("cuda"), purpose=TRAINING)
    left_out = "left out, because no two runs of its backward are equal: aten, cudnn"
    assert choice.why == f"the only one on sm_90; {left_out}"
    # The planner's device has the same rates.
    h100 = builtin_cluster("H100")
    on_cudnn = with_backend(h100, "cudnn", spec_of("cuda")).device
    assert on_cudnn.forward == RATES["sm_90"]["cudnn"].forward
    assert on_cudnn.rate(backward=False, window=True) == RATES["sm_90"]["aten"].forward
    for arch, headdims in GLUON_HEADDIMS.items():
        assert configs.in_gluon(arch).keys() == headdims
    for arch, headdims in ONE_PASS_HEADDIMS.items():
        assert configs.ONE_PASS[arch].keys() == headdims
    odd = spec_of("cuda", headdim=96, headdim_v=96)
    assert backend_elsewhere(odd, Purpose(), "sm_90") == "cudnn"


def test_a_named_backend_runs_or_raises_its_reason(gpu: Pretend) -> None:
    gpu((9, 0), {})
    with pytest.raises(ValueError, match="'aten'.*'reference'.*'fast'"):
        choose_backend(spec_of(), "fast")
    with pytest.raises(ValueError, match="'fast'"):
        get_backend("fast")
    with pytest.raises(NotImplementedError, match=r"got cpu; .*\['aten', 'reference'\]"):
        choose_backend(spec_of(), "cudnn")
    with pytest.raises(NotImplementedError, match="backend='aten'.*no softcap"):
        choose_backend(spec_of(softcap=30.0), "aten")
    with pytest.raises(ImportError, match=r"pip install 'ring-attn\[flash\]'"):
        choose_backend(spec_of("cuda"), "flash_attn")
    gpu((9, 0), INSTALLED)
    with pytest.raises(NotImplementedError, match="on cuda, got cpu"):
        choose_backend(spec_of(), "flash_attn")
