// Prints the tokens that sampling may draw: each line of standard input has temperature, k, p, V and V logits, and becomes
// a line of token numbers.
#include "run/sample.h"

#include <math.h>

int main(void) {
    enum { MAX_V = 1000 };
    static float logits[MAX_V];
    static double scratch[MAX_V];
    SampleConfig config = {0};
    int V;
    while (scanf("%lf %d %lf %d", &config.temperature, &config.top_k, &config.top_p, &V) == 4 && V <= MAX_V) {
        for (int v = 0; v < V; v++)
            if (scanf("%f", &logits[v]) != 1) return ERR_INPUT;
        sample_token(logits, scratch, V, &config, 0.5);
        for (int v = 0; v < V; v++)
            if (!isinf(logits[v])) printf("%d ", v);
        printf("\n");
    }
    return 0;
}
