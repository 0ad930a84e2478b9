#!/usr/bin/env python3
"""Prints the text column of parquet files as jsonl."""
import json
import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "../scripts"))
from run_log import EXIT_INPUT, Fault, Parser, run_main

BATCH_ROWS = 1000  # a few megabytes of web pages


def batches(path, field):
    """Yields lines of JSON, as bytes."""
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.ParquetFile(path)
        if field not in table.schema_arrow.names:
            raise ValueError(f"it has no column '{field}', but {', '.join(table.schema_arrow.names)}")
        for batch in table.iter_batches(BATCH_ROWS, columns=[field]):
            texts = (text for text in batch.column(0).to_pylist() if text)
            yield "".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts).encode()
    except (OSError, ValueError, pyarrow.ArrowException) as error:
        raise Fault(EXIT_INPUT, f"{path}: {str(error).splitlines()[0].rstrip('.')}. Get the file again") from None


def main():
    parser = Parser(description=__doc__)
    parser.add_argument("files", nargs="+", metavar="FILE")
    parser.add_argument("--field", default="text", help="the column (default: %(default)s)")
    args = parser.parse_args()
    for path in args.files:
        for lines in batches(path, args.field):
            sys.stdout.buffer.write(lines)


if __name__ == "__main__":
    run_main(main, "pyarrow")
