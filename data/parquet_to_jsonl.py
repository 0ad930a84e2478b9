#!/usr/bin/env python3
"""Prints the text column of parquet files as jsonl."""
import json
import os
import sys

sys.dont_write_bytecode = True
sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "../scripts"))
from run_log import EXIT_INPUT, EXIT_WRITE, Fault, Parser, run_main

BATCH_ROWS = 1000  # a few megabytes of web pages


def write(data):
    try:
        sys.stdout.buffer.write(data)
    except BrokenPipeError:
        sys.exit(EXIT_WRITE)  # the reader has reported the error
    except OSError as error:
        raise Fault(EXIT_WRITE, f"standard output: {error.strerror}") from None


def main():
    parser = Parser(description=__doc__)
    parser.add_argument("files", nargs="+", metavar="FILE")
    parser.add_argument("--field", default="text", help="the column (default: %(default)s)")
    args = parser.parse_args()
    import pyarrow.parquet

    for path in args.files:
        try:
            table = pyarrow.parquet.ParquetFile(path)
            if args.field not in table.schema_arrow.names:
                raise ValueError(f"it has no column '{args.field}', but {', '.join(table.schema_arrow.names)}")
            for batch in table.iter_batches(BATCH_ROWS, columns=[args.field]):
                texts = (text for text in batch.column(0).to_pylist() if text)
                lines = (json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts)
                write("".join(lines).encode())
        except (OSError, ValueError, pyarrow.ArrowException) as error:
            raise Fault(EXIT_INPUT, f"{path}: {str(error).splitlines()[0].rstrip('.')}. Get the file again") from None


if __name__ == "__main__":
    run_main(main, "pyarrow")
