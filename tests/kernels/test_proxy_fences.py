"""Missing proxy fences are found in PTX, on every path, and no others."""

from __future__ import annotations

import pytest

from dev.proxy_fences import missing_fences

COPY = "cp.async.cg.shared.global [ %r1 + 0 ], [ %rd1 + 0 ], 0x10, %r2;"
VECTOR = "@%p2 cp.async.ca.shared.global [ %r1 + 0 ], [ %rd1 + 0 ], 0x4, %r2;"
COMMIT = "cp.async.commit_group;"
FENCE = "fence.proxy.async.shared::cta;"
PRODUCT = (
    "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%f1, %f2}, %rd2, %rd3, 1, 1, 1, 0, 0;"
)
ON_BLACKWELL = "@%p1 tcgen05.mma.cta_group::1.kind::f16 [ %r3 + 0 ], %rd2, %rd3, %r4, %p3;"
STORE = "st.shared.v2.b32 [ %r1 + 0 ], {%r2, %r3};"
LOAD = "ld.shared.v2.b32 {%r2, %r3}, [%r1];"


def wait(groups: int) -> str:
    return f"cp.async.wait_group {groups};"


# A pipeline of two stages: the copies for the next pass are under way during the product.
LOOP = [
    COPY,
    COMMIT,
    "LOOP:",
    COPY,
    COMMIT,
    wait(1),
    "bar.sync 0;",
    FENCE,
    PRODUCT,
    "@%p1 bra LOOP;",
    "ret;",
]

FENCED = {
    "a loop": LOOP,
    "tcgen05": [COPY, COMMIT, wait(0), FENCE, "bar.sync 0;", ON_BLACKWELL],
    "a store": [STORE, "bar.sync 0;", FENCE, PRODUCT],
    "copies that nobody has waited for": [COPY, COMMIT, PRODUCT],
    "a wait for a vector": [COPY, COMMIT, VECTOR, COMMIT, wait(1), FENCE, wait(0), PRODUCT],
    "bulk copies": [
        "cp.async.bulk.tensor.2d.shared::cta.global.mbarrier::complete_tx::bytes "
        "[%r1], [%rd1, {%r2, %r3}], [%r4];",
        PRODUCT,
    ],
    "a branch without the product": [STORE, "@%p1 bra END;", FENCE, PRODUCT, "END:", "ret;"],
    "labels of inner braces": [
        "{",
        "WAIT:",
        "@!%p1 bra.uni WAIT;",
        "}",
        STORE,
        FENCE,
        "{",
        "WAIT:",
        "@!%p1 bra.uni WAIT;",
        "}",
        PRODUCT,
    ],
    "arguments of specialised warps": ["st.shared.v2.b32 [global_smem+64], {%r1, %r2};", PRODUCT],
    "the next task of specialised warps": [
        "LOOP:",
        "barrier.sync 1;",
        PRODUCT,
        STORE,
        "barrier.sync 1;",
        "bra.uni LOOP;",
    ],
    "values for other threads": [STORE, "bar.sync 0;", LOAD, PRODUCT],
}

MISSING = {
    "a loop": [line for line in LOOP if line != FENCE],
    "a fence before the loop": [
        FENCE,
        "LOOP:",
        PRODUCT,
        COPY,
        COMMIT,
        wait(0),
        "@%p1 bra LOOP;",
        "ret;",
    ],
    "the second wait": [COPY, COMMIT, COPY, COMMIT, wait(1), FENCE, wait(0), PRODUCT],
    "narrow copies by all threads": [VECTOR.removeprefix("@%p2 "), COMMIT, wait(0), PRODUCT],
    "tcgen05": [COPY, COMMIT, wait(0), "bar.sync 0;", ON_BLACKWELL],
    "a store": [STORE, "bar.sync 0;", PRODUCT],
    "a store by matrix": [
        "stmatrix.sync.aligned.m8n8.x1.shared.b16 [%r1], {%r2};",
        "bar.sync 0;",
        PRODUCT,
    ],
    "a tile, then values for other threads": [
        STORE,
        "bar.sync 0;",
        STORE,
        "bar.sync 0;",
        LOAD,
        PRODUCT,
    ],
    "a load before the barrier": [STORE, LOAD, "bar.sync 0;", PRODUCT],
    "values on one of two paths": [
        STORE,
        "@%p1 bra JOINED;",
        "bar.sync 0;",
        "JOINED:",
        LOAD,
        PRODUCT,
    ],
    "some threads' fence": [STORE, f"@%p1 {FENCE}", PRODUCT],
    "another space's fence": [STORE, "fence.proxy.async.global;", PRODUCT],
    "a switch": [
        STORE,
        "TARGETS: .branchtargets FENCED, BARE;",
        "brx.idx %r1, TARGETS;",
        "FENCED:",
        FENCE,
        "bra.uni END;",
        "BARE:",
        PRODUCT,
        "END:",
        "ret;",
    ],
}


def kernel(body: list[str]) -> str:
    """A module whose first statement stands in line 5."""
    head = ".version 8.7\n.visible .entry toy(\n.param .u64 .ptr .global p\n) .reqntid 128 {"
    return "\n".join([head, *body, "}"])


@pytest.mark.parametrize("name", FENCED)
def test_what_is_fenced_passes(name: str) -> None:
    assert missing_fences(kernel(FENCED[name])) == ()


@pytest.mark.parametrize("name", MISSING)
def test_a_missing_fence_is_found_with_its_line(name: str) -> None:
    body = MISSING[name]
    (found,) = missing_fences(kernel(body))
    product = next(i for i, line in enumerate(body) if "mma" in line)
    assert found.startswith(f"line {5 + product}: ")


def test_what_is_not_known_is_refused() -> None:
    with pytest.raises(ValueError, match=r"line 6: cp\.async\.wait_all"):
        missing_fences(kernel([COPY, "cp.async.wait_all;"]))
    with pytest.raises(ValueError, match=r"no \.entry"):
        missing_fences("")
