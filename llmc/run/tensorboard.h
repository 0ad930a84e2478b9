// tensorboard: event files that TensorBoard reads, written without it: one file for each part of a run.
//
//     events.out.tfevents.SECONDS.HOST.PID, a sequence of records (TFRecord):
//         uint64  bytes of the data            little-endian
//         uint32  masked CRC-32C of the length
//         data    an Event (protocol buffer, proto3)
//         uint32  masked CRC-32C of the data
//
// Record format: tensorflow/core/lib/io/record_writer.h; messages: tensorflow/core/util/event.proto and
// framework/summary.proto, tensor.proto; CRC-32C: RFC 3720, appendix B.4; its mask: core/lib/hash/crc32c.h.
#ifndef GNS_TENSORBOARD_H
#define GNS_TENSORBOARD_H

#include "base/common.h"

typedef struct TensorBoard TensorBoard;

// Begins a new file in the directory, behind those of earlier parts of the run. first_step: of this part.
int tensorboard_create(TensorBoard **out, const char *directory, int64_t first_step, Error *e);

// Numbers of one step: collected, and written as one record. NaN is left out.
void tensorboard_scalar(TensorBoard *tb, const char *tag, double value);
int tensorboard_write(TensorBoard *tb, int64_t step, Error *e);

// A text, shown as it is (in a fixed-width font); UTF-8.
int tensorboard_text(TensorBoard *tb, int64_t step, const char *tag, const char *text, Error *e);

int tensorboard_close(TensorBoard *tb, Error *e); // NULL is fine

// Cuts all event files in the directory back to `step` steps: a run that goes on from a checkpoint tells what came
// after it again. A file of which nothing is left goes. A torn end, as of a machine that failed, is cut off too.
int tensorboard_cut(const char *directory, int64_t step, Error *e);
#endif
