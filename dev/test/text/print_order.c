// Prints the examples of a run: print_order FILES T SEED FIRST COUNT. A line each, its window and its tokens.
#include "text/shards.h"

#include <stdlib.h>

int main(int argc, char **argv) {
    enum { ANY_TOKEN = 65536 };
    if (argc != 6) return ERR_USAGE;
    int T = atoi(argv[2]), code = 0;
    uint64_t first = strtoull(argv[4], NULL, 10), count = strtoull(argv[5], NULL, 10);
    uint16_t *row = malloc(((size_t)T + 1) * sizeof *row);
    Dataset *data;
    Error e;
    code = dataset_open(&data, argv[1], T, ANY_TOKEN, strtoull(argv[3], NULL, 10), &e);
    for (uint64_t i = first; i < first + count && !code; i++) {
        code = dataset_rows(data, i, 1, row, &e);
        printf("%llu", (unsigned long long)dataset_window_at(data, i));
        for (int t = 0; t <= T && !code; t++) printf(" %d", row[t]);
        printf("\n");
    }
    if (code) error_print(&e);
    dataset_close(data);
    free(row);
    return code;
}
