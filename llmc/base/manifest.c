// A manifest keeps these promises:
// 1. It is written last, when all its files are on the disk. A directory whose files pass manifest_verify is complete.
// 2. A digest is that of the bytes handed to the writer, not of bytes read back: VERIFY_DISK finds every wrong bit.
// 3. Its last line hashes all bytes above: manifest_read refuses a manifest with a wrong bit.
// 4. A manifest of another format (`foreign`) is not reported as damaged: another build can read it.
#include "base/manifest.h"

#include "base/json.h"
#include "base/text.h"

#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <limits.h>
#include <string.h>
#include <sys/stat.h>

#define LAST_LINES "  \"xxh3_128_above\": \"%s\"\n}\n"

enum { LAST_BYTES = sizeof LAST_LINES - sizeof "%s" + HASH_TEXT - 1 };

static const char *const damaged = "the checkpoint is damaged or incomplete: use another one";

// ---- Writing --------------------------------------------------------------------------------------------------------

void manifest_add(Manifest *manifest, const char *name, FileDigest digest) {
    if (!manifest) return;
    assert(manifest->count < MANIFEST_FILES && strlen(name) < MANIFEST_FILE_NAME);
    strcpy(manifest->file[manifest->count].name, name);
    manifest->file[manifest->count++].digest = digest;
    pulse_beat(manifest->pulse);
}

static int save_file(int dir, const char *directory, const char *name, const void *data, size_t bytes,
                     FileDigest *digest, Error *e) {
    char path[PATH_MAX];
    TRY(path_join(path, sizeof path, directory, name, e));
    return file_save_in(dir, path, data, bytes, digest, e);
}

int manifest_save(Manifest *manifest, const char *directory, const char *name, const void *data, size_t bytes,
                  Error *e) {
    FileDigest digest;
    TRY(save_file(manifest_dir(manifest), directory, name, data, bytes, &digest, e));
    manifest_add(manifest, name, digest);
    return 0;
}

int manifest_write(const Manifest *manifest, const char *directory, Error *e) {
    Text text;
    TRY(text_begin(&text, e));
    fputs("{\n  \"format\": 1,\n", text.f);
    if (*manifest->run) fprintf(text.f, "  \"run\": \"%s\",\n", manifest->run);
    fputs("  \"files\": [", text.f);
    for (int i = 0; i < manifest->count; i++)
        fprintf(text.f, "%s\n    {\"name\": \"%s\", \"bytes\": %" PRIu64 ", \"xxh3_128\": \"%s\"}", i ? "," : "",
                manifest->file[i].name, manifest->file[i].digest.bytes, manifest->file[i].digest.hash);
    fputs("\n  ],\n", text.f);
    fflush(text.f); // text.text holds the lines so far
    fprintf(text.f, LAST_LINES, digest_of(text.text, text.bytes).hash);
    TRY(text_end(&text, e));
    int code = save_file(manifest->dir, directory, MANIFEST_NAME, text.text, text.bytes, NULL, e);
    text_free(&text);
    if (code) return code;
    pulse_beat(manifest->pulse);
    return descriptor_sync(manifest->dir, directory, e);
}

// ---- Reading --------------------------------------------------------------------------------------------------------

static int parse_file(Manifest *manifest, const cJSON *item, const char *path, Error *e) {
    const cJSON *name = json_get(item, "name"), *bytes = json_get(item, "bytes"), *hash = json_get(item, "xxh3_128");
    bool good = cJSON_IsString(name) && json_whole(bytes, 0, 9e15) && cJSON_IsString(hash) &&
                strlen(name->valuestring) < MANIFEST_FILE_NAME && !strchr(name->valuestring, '/') &&
                strlen(hash->valuestring) == HASH_TEXT - 1;
    if (!good || manifest->count == MANIFEST_FILES)
        return FAIL(e, ERR_INPUT, damaged, "%s: entry %d of \"files\" is malformed", path, manifest->count);
    FileDigest digest = {.bytes = (uint64_t)bytes->valuedouble};
    strcpy(digest.hash, hash->valuestring);
    manifest_add(manifest, name->valuestring, digest);
    return 0;
}

static int parse_manifest(Manifest *manifest, const JsonText *json, const char *path, Error *e) {
    const cJSON *format = json_get(json->root, "format"), *files = json_get(json->root, "files"), *item;
    const char *run = cJSON_GetStringValue(json_get(json->root, "run"));
    snprintf(manifest->run, sizeof manifest->run, "%s", run ? run : "");
    manifest->foreign = !json_whole(format, 1, 1);
    if (manifest->foreign)
        return FAIL(e, ERR_INPUT, "was it written by a newer version? Use that one", "%s: \"format\" is not 1", path);
    if (!cJSON_IsArray(files)) return FAIL(e, ERR_INPUT, damaged, "%s: \"files\" is not a list", path);
    cJSON_ArrayForEach(item, files) TRY(parse_file(manifest, item, path, e));
    return 0;
}

static bool last_lines_right(const char *text, size_t bytes) {
    char want[LAST_BYTES + 1];
    if (bytes <= LAST_BYTES) return false;
    const char *last = text + bytes - LAST_BYTES;
    snprintf(want, sizeof want, LAST_LINES, digest_of(text, bytes - LAST_BYTES).hash);
    return memcmp(last, want, LAST_BYTES) == 0;
}

int manifest_read(Manifest *manifest, int dir, const char *directory, Error *e) {
    char path[PATH_MAX], *text;
    size_t bytes;
    JsonText json;
    *manifest = (Manifest){.dir = dir};
    TRY(path_join(path, sizeof path, directory, MANIFEST_NAME, e));
    TRY(file_read_in(dir, path, 1 << 20, &text, &bytes, e));
    if (!last_lines_right(text, bytes)) {
        memory_free(text);
        return FAIL(e, ERR_INPUT, damaged,
                    "%s: damaged: its last line is not the hash of the lines above, in bytes 0 to %zu", path, bytes);
    }
    TRY(json_parse_text(&json, text, bytes, 0, path, damaged, e));
    int code = parse_manifest(manifest, &json, path, e);
    json_free(&json);
    return code;
}

static int verify_file(const Manifest *manifest, int i, const char *directory, Verify what, Error *e) {
    const FileDigest *want = &manifest->file[i].digest;
    char path[PATH_MAX];
    struct stat st;
    FileDigest got = *want;
    TRY(path_join(path, sizeof path, directory, manifest->file[i].name, e));
    bool in_path = manifest->dir == IN_PATH;
    if (fstatat(in_path ? AT_FDCWD : manifest->dir, in_path ? path : path_name(path), &st, 0) != 0) {
        if (!file_missing_in(manifest->dir, path))
            return FAIL_UNREADABLE(e, "make it readable", "%s: %s", path, strerror(errno));
        st.st_mode = 0;
    }
    if (!S_ISREG(st.st_mode)) return FAIL(e, ERR_INPUT, damaged, "%s: missing, but listed in " MANIFEST_NAME, path);
    if ((uint64_t)st.st_size != want->bytes)
        return FAIL(e, ERR_INPUT, damaged, "%s: damaged: %lld bytes, but written with %" PRIu64, path,
                    (long long)st.st_size, want->bytes);
    if (what != VERIFY_SIZES)
        TRY(file_digest_in(manifest->dir, path, what == VERIFY_DISK ? DIGEST_DISK : DIGEST_ALL, manifest->pulse, &got,
                           e));
    pulse_beat(manifest->pulse);
    if (digest_equal(&got, want)) return 0;
    return FAIL(e, ERR_INPUT, damaged, "%s: damaged: its XXH3-128 is %s, but was %s when written", path, got.hash,
                want->hash);
}

int manifest_verify(const Manifest *manifest, const char *directory, Verify what, Error *e) {
    for (int i = 0; i < manifest->count; i++) TRY(verify_file(manifest, i, directory, what, e));
    return 0;
}

int manifest_verify_file(const Manifest *manifest, const char *directory, const char *name, Error *e) {
    for (int i = 0; i < manifest->count; i++)
        if (strcmp(manifest->file[i].name, name) == 0) return verify_file(manifest, i, directory, VERIFY_DISK, e);
    return FAIL(e, ERR_INPUT, "it is none of the checkpoint's files", "%s/%s: not listed in " MANIFEST_NAME, directory,
                name);
}
