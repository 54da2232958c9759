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
        if args.report is not None:
            print(f"\nreport             {args.report}")
    return 0
