// schedule: the learning rate as a function of the tokens done, not of steps, so a changing batch does not distort it.
//
// Every kind warms up linearly from 0 to lr over warmup_tokens (Goyal et al. 2017, arXiv 1706.02677), then:
//   constant      lr
//   linear        a line down to final_frac * lr at train_tokens
//   cosine        half a cosine down to final_frac * lr at train_tokens (Loshchilov, Hutter 2017, arXiv 1608.03983)
//   wsd           as 1 - sqrt(share of the decay done), down to final_frac * lr at train_tokens (Haegele et al. 2024,
//                 arXiv 2405.18392, "1-sqrt"; as in llm.c)
//   inverse-sqrt  lr sqrt(warmup / tokens) (Vaswani et al. 2017, arXiv 1706.03762, eq. 3). Without a warm-up: lr for 1%
//                 of the horizon, then lr sqrt(1% of the horizon / tokens)
// linear, cosine and wsd hold lr until hold_frac of the horizon (warm-up, stable, decay: Hu et al. 2024, arXiv
// 2404.06395, section 4). After the horizon they hold final_frac * lr. constant and inverse-sqrt ignore both fractions.
#pragma once

#include "base/common.h"
#include <math.h>

typedef enum {
    SCHEDULE_CONSTANT,
    SCHEDULE_LINEAR,
    SCHEDULE_COSINE,
    SCHEDULE_INVERSE_SQRT,
    SCHEDULE_WSD,
    SCHEDULE_KINDS
} ScheduleKind;

typedef struct {
    ScheduleKind kind;
    double lr; // the peak
    double warmup_tokens, train_tokens, final_frac, hold_frac;
} Schedule;

#define SCHEDULE_HOLD_FRAC     0.01 // inverse-sqrt without a warm-up: share of the horizon at lr
#define SCHEDULE_WSD_HOLD_FRAC 0.8  // default of hold_frac with wsd, as in llm.c

GNS_HD static inline double schedule_lr(const Schedule *s, double tokens) {
    if (tokens < s->warmup_tokens) return s->lr * tokens / s->warmup_tokens;
    const double pi = 3.141592653589793238, from = fmax(s->warmup_tokens, s->hold_frac * s->train_tokens);
    const double passed = fmax(0, (tokens - from) / (s->train_tokens - from));
    const double done = tokens >= s->train_tokens ? 1 : passed; // share of the decay
    double left = 1.0; // (rate - final_frac * lr) / (lr - final_frac * lr): 1 at the peak, 0 at the end
    switch (s->kind) {
    case SCHEDULE_LINEAR: left = 1.0 - done; break;
    case SCHEDULE_COSINE: left = 0.5 + 0.5 * cos(pi * done); break;
    case SCHEDULE_WSD: left = 1.0 - sqrt(done); break;
    case SCHEDULE_INVERSE_SQRT: {
        double scale = s->warmup_tokens > 0 ? s->warmup_tokens : SCHEDULE_HOLD_FRAC * s->train_tokens;
        return tokens > scale ? s->lr * sqrt(scale / tokens) : s->lr;
    }
    default: break; // constant
    }
    return s->lr * (s->final_frac + (1.0 - s->final_frac) * left);
}
