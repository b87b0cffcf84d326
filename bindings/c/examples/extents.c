/* Lists the extents of a disk: where each run of bytes lies.  extents IMAGE */
#include <inttypes.h>
#include <stdio.h>
#include <vdkit.h>

static int show(void *user, const vdkit_extent *e)
{
    (void)user;
    printf("%12" PRIu64 " %12" PRIu64 "  %s%s", e->offset, e->length,
           e->flags & VDKIT_EXTENT_ZERO ? "zero" : "data",
           e->flags & VDKIT_EXTENT_COMPRESSED ? ", compressed" : "");
    if (e->flags & VDKIT_EXTENT_HOST)
        printf(", %s at %" PRIu64, e->host_file, e->host_offset);
    putchar('\n');
    return 0;
}

int main(int argc, char **argv)
{
    vdkit_disk *disk;

    if (argc != 2) {
        fprintf(stderr, "usage: extents IMAGE\n");
        return 2;
    }
    if (vdkit_open(argv[1], NULL, &disk) < 0 ||
        vdkit_extents(disk, vdkit_size(disk), 0, show, NULL) < 0 ||
        vdkit_close(disk) < 0) {
        fprintf(stderr, "%s\n", vdkit_error_message());
        return 1;
    }
    return 0;
}
