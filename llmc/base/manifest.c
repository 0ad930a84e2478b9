// A manifest keeps these promises:
// 1. It is written last, when all its files are on the disk. A directory whose files pass manifest_verify is complete.
// 2. A digest hashes the bytes handed to the writer, not bytes read back. So VERIFY_DISK finds a wrong bit on the disk,
//    except in files under 4 MiB, which it reads through the page cache. The rank that writes a piece hashes it. Any
//    process can verify it.
// 3. The last line hashes all bytes above it: manifest_read refuses a manifest with a wrong bit.
// 4. A manifest of another format (`foreign`) is not reported as damaged: another build can read it.
#include "base/manifest.h"

#include "base/text.h"
#include "base/thread.h"

#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define LAST_LINES "  \"xxh3_128_above\": \"%s\"\n}\n"

enum { FORMAT = 2 };
enum { LAST_BYTES = sizeof LAST_LINES - sizeof "%s" + HASH_TEXT - 1 };

static const char *const make_room = "free some space, or choose another --out";
static const char *const damaged = "the checkpoint is damaged or incomplete: use another one";

// ---- Writing --------------------------------------------------------------------------------------------------------

void manifest_free(Manifest *manifest) {
    while (manifest->count > 0) memory_free(manifest->file[--manifest->count].piece);
}

int manifest_add(Manifest *manifest, const char *name, const FileDigest *piece, int pieces, Error *e) {
    assert(manifest->count < MANIFEST_FILES && strlen(name) < MANIFEST_NAME_BYTES);
    ManifestFile *file = &manifest->file[manifest->count];
    *file = (ManifestFile){.pieces = pieces};
    strcpy(file->name, name);
    TRY(memory_alloc((void **)&file->piece, (size_t)pieces * sizeof *piece, "digests", e));
    memcpy(file->piece, piece, (size_t)pieces * sizeof *piece);
    for (int i = 0; i < pieces; i++) file->bytes += piece[i].bytes;
    manifest->count++;
    pulse_beat(manifest->pulse);
    return 0;
}

int manifest_open(const Manifest *manifest, const char *name, bool create, uint64_t bytes, int *fd, Error *e) {
    *fd = openat(manifest->dir, name, O_WRONLY | O_NOFOLLOW | O_CLOEXEC | (create ? O_CREAT | O_TRUNC : 0), 0666);
    if (*fd >= 0 && (!create || ftruncate(*fd, (off_t)bytes) == 0)) return 0;
    FAIL(e, ERR_WRITE, make_room, "%s/%s: cannot write: %s", manifest->path, name, strerror(errno));
    if (*fd >= 0) close(*fd);
    return *fd = -1, e->code;
}

static int write_file(const Manifest *manifest, const char *name, const void *data, size_t bytes, Error *e) {
    char path[PATH_MAX];
    int fd;
    TRY(path_join(path, sizeof path, manifest->path, name, e));
    TRY(manifest_open(manifest, name, true, bytes, &fd, e));
    int code = file_write_range(fd, path, 0, data, bytes, e), closed = file_close(fd, path, code ? &(Error){0} : e);
    return code ? code : closed;
}

int manifest_save(Manifest *manifest, const char *name, const void *data, size_t bytes, Error *e) {
    FileDigest digest = digest_of(data, bytes);
    TRY(write_file(manifest, name, data, bytes, e));
    return manifest_add(manifest, name, &digest, 1, e);
}

int manifest_write(const Manifest *manifest, Error *e) {
    Text text;
    TRY(text_begin(&text, e));
    fprintf(text.f, "{\n  \"format\": %d,\n  \"run\": \"%s\",\n  \"files\": [", FORMAT, manifest->run);
    for (int i = 0; i < manifest->count; i++) {
        const ManifestFile *file = &manifest->file[i];
        fprintf(text.f, "%s\n    {\"name\": \"%s\", \"bytes\": %" PRIu64 ", \"pieces\": [", i ? "," : "", file->name,
                file->bytes);
        for (int k = 0; k < file->pieces; k++)
            fprintf(text.f, "%s\n      [%" PRIu64 ", \"%s\"]", k ? "," : "", file->piece[k].bytes, file->piece[k].hash);
        fputs("]}", text.f);
    }
    fputs("\n  ],\n", text.f);
    fflush(text.f); // text.text holds the lines so far
    fprintf(text.f, LAST_LINES, digest_of(text.text, text.bytes).hash);
    TRY(text_end(&text, e));
    int code = write_file(manifest, MANIFEST_NAME, text.text, text.bytes, e);
    text_free(&text);
    int training = openat(manifest->dir, TRAINING, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (!code && training >= 0) code = descriptor_sync(training, manifest->path, e);
    if (training >= 0) close(training);
    pulse_beat(manifest->pulse);
    return code ? code : descriptor_sync(manifest->dir, manifest->path, e);
}

// ---- Reading --------------------------------------------------------------------------------------------------------

static bool parse_digest(FileDigest *digest, const cJSON *bytes, const cJSON *hash) {
    if (!json_whole(bytes, 0, 9e15) || !cJSON_IsString(hash) || strlen(hash->valuestring) != HASH_TEXT - 1)
        return false;
    digest->bytes = (uint64_t)bytes->valuedouble;
    strcpy(digest->hash, hash->valuestring);
    return true;
}

static int parse_file(Manifest *manifest, const cJSON *item, const char *path, Error *e) {
    const cJSON *name = json_get(item, "name"), *bytes = json_get(item, "bytes"), *list = json_get(item, "pieces"),
                *one;
    FileDigest *piece;
    int pieces = list ? cJSON_GetArraySize(list) : 1, i = 0;
    const char *text = cJSON_GetStringValue(name), *slash = text ? strchr(text, '/') : NULL;
    bool in_training = slash && strncmp(text, TRAINING, strlen(TRAINING)) == 0 && !strchr(slash + 1, '/');
    bool good =
        text && strlen(text) < MANIFEST_NAME_BYTES && (!slash || in_training) && manifest->count < MANIFEST_FILES;
    TRY(memory_alloc((void **)&piece, (size_t)pieces * sizeof *piece, "digests", e));
    if (list)
        cJSON_ArrayForEach(one, list) good =
            parse_digest(&piece[i++], cJSON_GetArrayItem(one, 0), cJSON_GetArrayItem(one, 1)) && good;
    else good = parse_digest(piece, bytes, json_get(item, "xxh3_128")) && good;
    int code = good ? manifest_add(manifest, name->valuestring, piece, pieces, e) : 0;
    memory_free(piece);
    if (code) return code;
    if (good && json_whole(bytes, 0, 9e15) && manifest->file[manifest->count - 1].bytes == (uint64_t)bytes->valuedouble)
        return 0;
    return FAIL(e, ERR_INPUT, damaged, "%s: entry %d of \"files\" is malformed", path, manifest->count);
}

int manifest_read(Manifest *manifest, int dir, const char *directory, Error *e) {
    char path[PATH_MAX], last[LAST_BYTES + 1], *text;
    size_t bytes;
    cJSON *root;
    *manifest = (Manifest){.dir = dir};
    snprintf(manifest->path, sizeof manifest->path, "%s", directory);
    TRY(path_join(path, sizeof path, directory, MANIFEST_NAME, e));
    TRY(file_read(dir, path, 1 << 28, &text, &bytes, e));
    size_t above = bytes < LAST_BYTES ? 0 : bytes - LAST_BYTES;
    snprintf(last, sizeof last, LAST_LINES, digest_of(text, above).hash);
    if (!above || memcmp(text + above, last, LAST_BYTES) != 0) {
        memory_free(text);
        return FAIL(e, ERR_INPUT, damaged, "%s: damaged: its last line is not the hash of the lines above", path);
    }
    TRY(json_parse_text(&root, text, bytes, path, damaged, e));
    const cJSON *files = json_get(root, "files"), *item = cJSON_IsArray(files) ? files->child : NULL;
    const char *run = cJSON_GetStringValue(json_get(root, "run"));
    int code = 0;
    snprintf(manifest->run, sizeof manifest->run, "%s", run ? run : "");
    manifest->foreign = !json_whole(json_get(root, "format"), 1, FORMAT);
    if (manifest->foreign)
        code = FAIL(e, ERR_INPUT, "was it written by a newer version? Use that one", "%s: \"format\" is not 1 to %d",
                    path, FORMAT);
    else if (!item) code = FAIL(e, ERR_INPUT, damaged, "%s: it lists no \"files\"", path);
    for (; item && !code; item = item->next) code = parse_file(manifest, item, path, e);
    cJSON_Delete(root);
    return code;
}

// A file that is being verified.
typedef struct {
    const Manifest *manifest;
    const ManifestFile *file;
    int fd;
    const char *path;
} Verification;

// Divides the manifest's share of the file's pieces into `parts` parts, and verifies part `part`.
static int verify_pieces(void *verification, int part, int parts, Error *e) {
    const Verification *v = verification;
    const Share share = v->manifest->share;
    const uint64_t every = share.every ? (uint64_t)share.every : 1,
                   own = (uint64_t)share.first + every * (uint64_t)part;
    uint64_t at = 0;
    for (int i = 0; i < v->file->pieces; at += v->file->piece[i++].bytes) {
        const FileDigest *want = &v->file->piece[i];
        FileDigest got;
        if (at / MANIFEST_PIECE % (every * (uint64_t)parts) != own) continue;
        TRY(file_digest_range(v->fd, v->path, at, want->bytes, v->manifest->pulse, &got, e));
        if (!digest_equal(&got, want))
            return FAIL(e, ERR_INPUT, damaged,
                        "%s: damaged: the XXH3-128 of %" PRIu64 " bytes from byte %" PRIu64
                        " is %s, but was %s when written",
                        v->path, want->bytes, at, got.hash, want->hash);
    }
    return 0;
}

int manifest_verify(const Manifest *manifest, const char *but, Verify what, Error *e) {
    char path[PATH_MAX];
    struct stat st;
    for (const ManifestFile *file = manifest->file; file < manifest->file + manifest->count; file++) {
        if (but && strcmp(path_name(file->name), but) == 0) continue;
        TRY(path_join(path, sizeof path, manifest->path, file->name, e));
        const char *place = manifest->dir == IN_PATH ? path : file->name;
        int fd = openat(manifest->dir, place, O_RDONLY | O_CLOEXEC | O_NONBLOCK), code = 0;
        if (fd < 0 && errno != ENOENT && errno != ENOTDIR)
            return FAIL_UNREADABLE(e, "make it readable", "%s: %s", path, strerror(errno));
        if (fd < 0 || fstat(fd, &st) != 0 || !S_ISREG(st.st_mode))
            code = FAIL(e, ERR_INPUT, damaged, "%s: missing, but listed in " MANIFEST_NAME, path);
        else if ((uint64_t)st.st_size != file->bytes)
            code = FAIL(e, ERR_INPUT, damaged, "%s: damaged: %lld bytes, but written with %" PRIu64, path,
                        (long long)st.st_size, file->bytes);
        if (!code && what == VERIFY_DISK && file->bytes >= MANIFEST_PIECE) file_past_cache(fd, true);
        Verification v = {manifest, file, fd, path};
        if (!code && what == VERIFY_DISK) code = verify_pieces(&v, 0, 1, e);
        if (!code && what == VERIFY_BYTES) code = thread_divide(verify_pieces, &v, e);
        pulse_beat(manifest->pulse);
        if (fd >= 0) close(fd);
        TRY(code);
    }
    return 0;
}
