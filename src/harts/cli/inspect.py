"""`harts inspect`: what is in a rollout file, what sharing saves, and why prefixes break."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from harts.cli.inspection_text import inspection_text
from harts.cli.reading import read_rollouts
from harts.inspection.decoding import load_decoder
from harts.inspection.inspect import inspect_batch
from harts.report.inspect_report import write_inspect_report
from harts.report.page import check_destination
from harts.report.text import counted


def run(args: argparse.Namespace) -> int:
    """Read, measure, print, write the page of --report; never loads torch."""
    if args.report is not None:
        check_destination(args.report, made_from=args.file)
    decode = None if args.tokenizer is None else load_decoder(args.tokenizer)
    batch = read_rollouts(args, tokenizer_also_decodes=True)
    found = inspect_batch(batch, capacity=args.capacity, chunk_size=args.chunk_size, decode=decode)
    if args.report is not None:
        write_inspect_report(found, batch, args.report, source=Path(args.file).name)
    if args.json:
        print(json.dumps({"file": str(args.file)} | found.to_dict(), allow_nan=False))
    else:
        print(inspection_text(found))
        if found.scored_again:
            print(f"\nscored again       {_scored_again(found.scored_again)}")
        if args.report is not None:
            print(f"\nreport             {args.report}")
    return 0


def _scored_again(tokens: int) -> str:
    are = "is" if tokens == 1 else "are"
    return (
        f"{counted(tokens, 'token')} {are} scored in several trajectories of the same rollout: "
        "each counts as often; mask them in all but one"
    )
