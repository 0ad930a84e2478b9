// mpi_check: checked MPI calls. MPI_TRY returns MPI's errors (MPI_ERRORS_RETURN) as ERR_RANK.
#pragma once

#include "base/common.h"
#include <mpi.h>
#include <string.h>

static inline int mpi_fail(int result, const char *call, const char *file, int line, Error *e) {
    char text[MPI_MAX_ERROR_STRING] = "";
    int length = 0;
    MPI_Error_string(result, text, &length);
    return error_set(e, file, line, ERR_RANK, "look for the rank that failed first", "%.*s: %s",
                     (int)strcspn(call, "("), call, text);
}

#define MPI_TRY(call, e)                                                                                               \
    do {                                                                                                               \
        int mpi_result_ = (call);                                                                                      \
        if (mpi_result_ != MPI_SUCCESS) return mpi_fail(mpi_result_, #call, __FILE__, __LINE__, (e));                  \
    } while (0)
