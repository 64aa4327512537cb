"""A launch that is repeated asks the driver for just what the same launch made anew asks for."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from typing import Any

import pytest
import torch

from tests.kernels.test_aot import ROOT, compiling

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="stands in for the driver, which is here"),
    pytest.mark.skipif(shutil.which("gcc") is None, reason="the stand-in is built by gcc"),
]

CALLS = {
    "forward, only": (1, "q k v out lse"),
    "forward, only, sinks": (1, "q k v out lse sinks"),
    "forward, first": (1, "q k v acc m l"),
    "forward, first and middle": (2, "q k v acc m l"),
    "forward, last": (2, "q k v acc m l out lse"),
    "forward, no mask": (1, "q k v out lse"),
    "forward, gluon": (1, "q k v out lse counter"),
    "backward, gluon": (1, "q k v dout lse delta dq dk dv turns"),
    "dq": (1, "q k v dout lse delta dq"),
    "dkdv": (1, "q k v dout lse delta dk dv"),
    "delta": (1, "q dout lse new_lse new_delta"),
    "merge": (1, "out lse root_out root_lse sinks"),
}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    result = subprocess.run(
        [sys.executable, "-m", "tests.kernels.repeats", str(tmp_path_factory.mktemp("stub"))],
        cwd=ROOT,
        env=compiling(),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    answer: dict[str, Any] = json.loads(result.stdout)
    return answer


@pytest.mark.parametrize("name", CALLS)
def test_it_launches_what_a_new_one_launches(name: str, found: dict[str, Any]) -> None:
    case, (launches, tensors) = found["cases"][name], CALLS[name]
    assert case["made_anew"] == launches and case["made"] == 0
    assert case["got"] == case["expected"]
    assert [arg for arg in case["got"][2] if isinstance(arg, str)] == [
        *tensors.split(), *([] if name in ("delta", "merge") else ["blocks", "runs"]),
        *(["pieces"] if name == "backward, gluon" else []),
    ]  # fmt: skip


def test_what_differs_is_made_anew(found: dict[str, Any]) -> None:
    assert found["changes"] == {
        "nothing": 0, "tiles": 1, "strides": 1, "type": 1, "scale": 1, "back again": 0,
        # An address that is no multiple of 16 has a kernel of its own, and is never repeated.
        "alignment": 1, "alignment again": 1,
    }  # fmt: skip


def test_those_that_are_kept_have_a_bound(found: dict[str, Any]) -> None:
    assert found["bound"] == [1, 2, 3, 3, 3, 3, 3]


def test_tensors_that_are_replaced_are_not_kept(found: dict[str, Any]) -> None:
    assert found["freed"] is True


def test_a_repeated_step_takes_a_fraction_of_the_hosts_time(found: dict[str, Any]) -> None:
    """Triton's look at 50 arguments of each launch is the rest."""
    taken = found["host_us"]
    assert 0 < 2 * taken["repeated"] < taken["anew"], taken


def test_a_token_brings_nothing_from_the_host(found: dict[str, Any]) -> None:
    """One query's table is written by a launch; that of two is made on the host, and seen here."""
    from_host = {"aten::lift_fresh", "aten::to", "aten::_to_copy", "aten::_local_scalar_dense"}
    one, two = (found["decoding"][queries] for queries in "12")
    assert not from_host & set(one[0]) and one[1] == 3
    assert from_host & set(two[0]) and two[1] == 2
