"""`ring-attn audit FILE:FUNCTION`: find mistakes of a training step on several ranks."""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict

from ring_attn.cli.arguments import progress, write_json
from ring_attn.cli.env import machine
from ring_attn.core.names import AUDITED_SIZES
from ring_attn.testing.audit import audit


def run(args: argparse.Namespace) -> int:
    """Audit a step and print the report; return 1 if it found a mistake."""
    default_sizes = AUDITED_SIZES[:1] if args.quick else None
    sizes = args.world_size or default_sizes
    try:
        report = audit(args.step, sizes, timeout=args.timeout, tiny=args.tiny, on_stage=begin_stage)
    except (RuntimeError, TimeoutError) as error:
        print(error, file=sys.stderr)
        return 1
    given = {"command": "audit", "machine": machine(), "step": args.step, "ok": report.ok}
    write_json(args.json, given | asdict(report))
    print(str(report).splitlines()[0] if args.quiet else report)
    return 0 if report.ok else 1


def begin_stage(name: str, done: int, total: int) -> None:
    """Name a stage for lines of progress."""
    progress.begin(name, done=done, total=total)
