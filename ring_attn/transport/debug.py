"""Names the arguments in which calls of ranks differ.

With RING_ATTN_DEBUG=1 all ranks compare their arguments before each call. This takes two small
exchanges per call, over the ring's connections and within its timeout.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping

import torch
from torch import Tensor

from ring_attn.core.facts import Facts
from ring_attn.transport.base import Agreement, Transport, gather_texts, rank_name
from ring_attn.transport.ranks.identity import checksum, current_step, told

COMPARING = Agreement({"RING_ATTN_DEBUG": "1"})


def texts_of(kind: str, number: int | None, values: Mapping[str, Tensor | None]) -> dict[str, str]:
    """A call beside its agreement, and checksums of tensors that must be equal."""
    checksums = {name: int(checksum(x)) for name, x in values.items() if x is not None}
    call = kind if number is None else f"{kind} {number}"
    return {"call": call, **told(current_step(), checksums)}


def compared(
    transport: Transport, texts: Mapping[str, str], device: torch.device, agreement: Agreement
) -> ValueError | None:
    """Compares all ranks' calls; on every rank the error that names each differing argument."""
    report = {name: (text, text) for name, text in texts.items()} | agreement.report
    with transport.call("compare arguments", COMPARING, device):
        reports = gather_texts(transport, json.dumps(report), device)
    ranks = transport.global_ranks
    differs = difference(dict(zip(ranks, map(json.loads, reports), strict=True)))
    if differs is None:
        return None
    return ValueError(f"ranks disagree on the call; {'; '.join(differs.values())}")


def difference(reports: Mapping[int, Facts]) -> dict[str, str] | None:
    """A sentence for each differing argument, with the ranks' values; None if all are equal.

    `reports` are calls by global rank. A rank that refuses the call reports its "error" only.
    Different calls have other arguments, which are not compared.
    """
    errors = [
        f"{rank_name(rank)} raised {report['error'][0]}"
        for rank, report in reports.items()
        if "error" in report
    ]
    if errors:
        return {"error": "; ".join(errors)}
    differences = {}
    for name in ["call", *sorted({name for report in reports.values() for name in report})]:
        values = {rank: tuple(report.get(name, ("",) * 2)) for rank, report in reports.items()}
        (usual, fact), _ = Counter(values.values()).most_common(1)[0]
        odd = {rank: text for rank, (text, other) in values.items() if other != fact}
        if not odd:
            continue
        # Texts of long layouts and masks are shortened.
        same = {True: " with other values", False: ""}
        told = [f"{rank_name(rank)} has {text}{same[text == usual]}" for rank, text in odd.items()]
        rest = len(values) - len(odd)
        differences[name] = f"{name}: {', '.join(told)}, the other {rest} have {usual}"
        if name == "call":
            break
    return differences or None
