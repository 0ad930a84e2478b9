#!/usr/bin/env python3
"""The text column of parquet files as jsonl on standard output: parquet_to_jsonl.py [--field NAME] FILE..."""
import json
import sys

import pyarrow
import pyarrow.parquet

BATCH_ROWS = 1000  # a few megabytes of web pages


def main(arguments):
    field = "text"
    if arguments[:1] == ["--field"]:
        field, arguments = arguments[1], arguments[2:]
    for path in arguments:
        try:
            table = pyarrow.parquet.ParquetFile(path)
            if field not in table.schema_arrow.names:
                raise ValueError(f"it has no column '{field}', but {', '.join(table.schema_arrow.names)}")
            for batch in table.iter_batches(BATCH_ROWS, columns=[field]):
                texts = (text for text in batch.column(0).to_pylist() if text)
                lines = (json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts)
                sys.stdout.buffer.write("".join(lines).encode())
        except BrokenPipeError:
            return 74  # the reader has said why
        except (OSError, ValueError, pyarrow.ArrowException) as error:
            print(f"error: {path}: {str(error).splitlines()[0]}. Get the file again", file=sys.stderr)
            return 65
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
