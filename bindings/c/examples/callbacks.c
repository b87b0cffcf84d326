/* Reads an image whose bytes come from the program: here from memory.  callbacks IMAGE > RAW */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <vdkit.h>

struct memory {
    char *bytes;
    size_t len;
};

static int64_t size(void *user)
{
    return (int64_t)((struct memory *)user)->len;
}

static int64_t read_at(void *user, void *buf, size_t len, uint64_t offset)
{
    const struct memory *memory = user;

    if (offset >= memory->len)
        return 0;
    if (len > memory->len - offset)
        len = memory->len - offset;
    memcpy(buf, memory->bytes + offset, len);
    return (int64_t)len; /* or -EIO */
}

int main(int argc, char **argv)
{
    static char buf[1 << 16];
    vdkit_storage_ops ops = { .struct_size = sizeof ops, .size = size, .pread = read_at };
    struct memory memory = { 0 };
    vdkit_disk *disk;
    FILE *file;

    if (argc != 2 || !(file = fopen(argv[1], "rb"))) {
        fprintf(stderr, "usage: callbacks IMAGE\n");
        return 2;
    }
    for (size_t got = 1; got > 0; memory.len += got) {
        memory.bytes = realloc(memory.bytes, memory.len + sizeof buf);
        got = fread(memory.bytes + memory.len, 1, sizeof buf, file);
    }
    fclose(file);
    if (vdkit_open_storage(&ops, &memory, argv[1], NULL, &disk) < 0)
        goto failed;
    for (uint64_t at = 0; at < vdkit_size(disk); at += sizeof buf) {
        size_t len = sizeof buf;

        if (len > vdkit_size(disk) - at)
            len = vdkit_size(disk) - at;
        if (vdkit_pread(disk, buf, len, at) < 0)
            goto failed;
        fwrite(buf, 1, len, stdout);
    }
    if (vdkit_close(disk) < 0)
        goto failed;
    free(memory.bytes);
    return 0;
failed:
    fprintf(stderr, "%s\n", vdkit_error_message());
    return 1;
}
