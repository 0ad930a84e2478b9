// call_ok: CALL_OK(f(..., &e)) checks that a call succeeds; the macro declares the Error e.
#pragma once

#include "../test.h"

#define CALL_OK(call)                                                                                                  \
    do {                                                                                                               \
        Error e = {};                                                                                                  \
        CHECK_OK(call, &e);                                                                                            \
    } while (0)
