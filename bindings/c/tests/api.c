/* Every function of the library, called from C: good calls, bad ones, faults in callbacks, 8 threads.
 * Run in an empty folder; prints a line for what does not hold. */
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>
#include <vdkit.h>

static int bad;

#define CHECK(what)                                                                        \
    do {                                                                                   \
        if (!(what)) {                                                                     \
            printf("line %d: %s: %s\n", __LINE__, #what, vdkit_error_message());           \
            bad = 1;                                                                       \
        }                                                                                  \
    } while (0)
#define OK(call) CHECK((call) == 0)
#define MIB (1 << 20)

static vdkit_open_options *writing(const char *format)
{
    vdkit_open_options *options = NULL;

    OK(vdkit_open_options_new(&options));
    OK(vdkit_open_options_writable(options, 1));
    OK(vdkit_open_options_format(options, format));
    return options;
}

/* With options of the format, and on a backing image in qcow2; both may be NULL. */
static int create(const char *path, const char *format, uint64_t size, const char *text,
                  const char *backing)
{
    vdkit_create_options *options = NULL;
    int result;

    OK(vdkit_create_options_new(&options));
    if (text)
        OK(vdkit_create_options_add(options, text));
    if (backing)
        OK(vdkit_create_options_backing(options, backing, "qcow2", NULL));
    result = vdkit_create(path, format, size, options, 0, NULL);
    vdkit_create_options_free(options);
    return result;
}

static void errors(void)
{
    vdkit_disk *disk = NULL;
    char *json = NULL;
    FILE *file;

    CHECK(vdkit_open("missing.qcow2", NULL, &disk) == VDKIT_E_NOT_FOUND);
    CHECK(disk == NULL);
    CHECK(vdkit_error_code() == VDKIT_E_NOT_FOUND);
    CHECK(strcmp(vdkit_error_file(), "missing.qcow2") == 0);
    CHECK(strstr(vdkit_error_message(), "No such file") != NULL);
    CHECK(vdkit_error_errno() == ENOENT);
    CHECK(vdkit_error_offset() == -1);
    CHECK(vdkit_open(NULL, NULL, &disk) == VDKIT_E_USAGE);
    CHECK(vdkit_error_errno() == 0);
    disk = (vdkit_disk *)0x1234; /* a place that nobody has set */
    CHECK(vdkit_open("missing.qcow2", NULL, &disk) < 0 && disk == NULL);
    CHECK(vdkit_open("missing.qcow2", NULL, NULL) == VDKIT_E_USAGE);
    CHECK(vdkit_api_version() == VDKIT_API_VERSION);
    CHECK(vdkit_create("x.qcow2", "qcow2", MIB, NULL, 0x80, NULL) == VDKIT_E_USAGE);
    CHECK(vdkit_pread(NULL, &json, 1, 0) == VDKIT_E_USAGE);
    CHECK(vdkit_size(NULL) == 0);
    OK(vdkit_close(NULL));
    vdkit_free(NULL);
    vdkit_open_options_free(NULL);
    vdkit_create_options_free(NULL);
    vdkit_queue_free(NULL);
    OK(vdkit_server_stop(NULL, 0));
    CHECK(vdkit_create("x.qcow2", "nonsense", MIB, NULL, 0, NULL) == VDKIT_E_USAGE);
    CHECK(create("x.qcow2", "qcow2", MIB, "nonsense=1", NULL) == VDKIT_E_USAGE);

    /* A damaged header: the kind, the file, the offset. */
    OK(vdkit_create("damaged.qcow2", "qcow2", MIB, NULL, 0, NULL));
    file = fopen("damaged.qcow2", "r+b");
    fseek(file, 20, SEEK_SET);
    fwrite("\0\0\0\1", 1, 4, file); /* clusters of two bytes */
    fclose(file);
    CHECK(vdkit_open("damaged.qcow2", NULL, &disk) == VDKIT_E_CORRUPT);
    CHECK(vdkit_error_offset() == 20);
    CHECK(strcmp(vdkit_error_file(), "damaged.qcow2") == 0);

    /* A policy for references. */
    OK(vdkit_create("base.qcow2", "qcow2", MIB, NULL, 0, NULL));
    OK(create("top.qcow2", "qcow2", 0, NULL, "base.qcow2"));
    vdkit_open_options *options;
    OK(vdkit_open_options_new(&options));
    OK(vdkit_open_options_references(options, "nothing"));
    CHECK(vdkit_open("top.qcow2", options, &disk) == VDKIT_E_REFUSED);
    CHECK(vdkit_error_hint() != NULL);
    CHECK(vdkit_open_options_references(options, "nonsense") == VDKIT_E_USAGE);
    vdkit_open_options_free(options);
    OK(vdkit_info("top.qcow2", NULL, &json));
    CHECK(strstr(json, "\"base.qcow2\"") != NULL);
    CHECK(vdkit_error_code() == 0);
    vdkit_free(json);
}

static int asked;

static int decide(void *user, const char *file, const char *target)
{
    CHECK(strcmp(file, "top.qcow2") == 0 && strcmp(target, "base.qcow2") == 0);
    asked++;
    return *(int *)user;
}

static void judge(void)
{
    vdkit_open_options *options;
    vdkit_disk *disk;
    int answer = 0;

    OK(vdkit_open_options_new(&options));
    OK(vdkit_open_options_ask(options, decide, &answer));
    CHECK(vdkit_open("top.qcow2", options, &disk) == VDKIT_E_REFUSED);
    answer = 1;
    OK(vdkit_open("top.qcow2", options, &disk));
    CHECK(asked == 2);
    OK(vdkit_close(disk));
    vdkit_open_options_free(options);
}

static int count_extents(void *user, const vdkit_extent *extent)
{
    CHECK(extent->length > 0 && extent->struct_size == sizeof *extent);
    return ++*(int *)user == 2;
}

struct marked {
    vdkit_disk *disk;
    uint64_t last, bytes;
    int stop;
};

static int add_range(void *user, uint64_t offset, uint64_t length)
{
    struct marked *marked = user;
    char byte;

    OK(vdkit_pread(marked->disk, &byte, 1, offset)); /* the disk may be used meanwhile */
    OK(vdkit_flush(marked->disk));
    marked->last = offset;
    marked->bytes += length;
    return marked->stop;
}

static void reading_and_writing(void)
{
    vdkit_open_options *options = writing("qcow2");
    vdkit_disk *disk = NULL;
    char buf[4096], *json = NULL;
    struct iovec pieces[2] = { { buf, 100 }, { buf + 200, 412 } };
    int extents = 0;

    OK(create("a.qcow2", "qcow2", 4 * MIB, "cluster_size=4K", NULL));
    CHECK(vdkit_create("a.qcow2", "qcow2", MIB, NULL, 0, NULL) < 0);
    OK(vdkit_open("a.qcow2", options, &disk));
    CHECK(vdkit_size(disk) == 4 * MIB && vdkit_is_writable(disk));
    memset(buf, 7, sizeof buf);
    OK(vdkit_pwrite(disk, buf, sizeof buf, 8192));
    OK(vdkit_pwritev(disk, (vdkit_iovec *)pieces, 2, MIB));
    OK(vdkit_flush(disk));
    memset(buf, 1, sizeof buf);
    OK(vdkit_pread(disk, buf, sizeof buf, 8192 - 1));
    CHECK(buf[0] == 0 && buf[1] == 7 && buf[4095] == 7);
    OK(vdkit_preadv(disk, (vdkit_iovec *)pieces, 2, MIB));
    CHECK(buf[99] == 7 && buf[200] == 7);
    CHECK(vdkit_pread(disk, buf, 2, 4 * MIB - 1) < 0);
    /* Pieces of which one does not fit: none is written. */
    CHECK(vdkit_pwritev(disk, (vdkit_iovec *)pieces, 2, 4 * MIB - 200) == VDKIT_E_USAGE);
    OK(vdkit_pread(disk, buf + 512, 200, 4 * MIB - 200));
    CHECK(buf[512] == 0 && buf[711] == 0);
    CHECK(vdkit_preadv(disk, (vdkit_iovec *)pieces, 2, 4 * MIB - 200) == VDKIT_E_USAGE);
    CHECK(vdkit_pwrite(disk, NULL, 5, 0) == VDKIT_E_USAGE);
    CHECK(vdkit_preadv(disk, NULL, -1, 0) == VDKIT_E_USAGE);
    OK(vdkit_pread(disk, NULL, 0, 0));
    OK(vdkit_write_zeroes(disk, 4096, 8192, VDKIT_MAY_UNMAP));
    OK(vdkit_pread(disk, buf, 1, 8192));
    CHECK(buf[0] == 0);
    OK(vdkit_discard(disk, MIB, 2 * MIB));
    CHECK(vdkit_extents(disk, 4 * MIB, 0, count_extents, &extents) == VDKIT_E_INTERRUPTED);
    CHECK(extents == 2);
    CHECK(vdkit_resize(disk, MIB, 0, NULL) == VDKIT_E_USAGE);
    OK(vdkit_resize(disk, 5 * MIB, 0, NULL));
    OK(vdkit_resize(disk, 4 * MIB, VDKIT_SHRINK, NULL));
    OK(vdkit_snapshot(disk, VDKIT_SNAPSHOT_CREATE, "one", NULL));
    OK(vdkit_pwrite(disk, "x", 1, 0));
    OK(vdkit_snapshots(disk, &json));
    CHECK(strstr(json, "\"one\"") != NULL);
    vdkit_free(json);
    OK(vdkit_snapshot(disk, VDKIT_SNAPSHOT_APPLY, "one", NULL));
    OK(vdkit_pread(disk, buf, 1, 0));
    CHECK(buf[0] == 0);
    OK(vdkit_snapshot(disk, VDKIT_SNAPSHOT_DELETE, "one", NULL));
    CHECK(vdkit_snapshot(disk, VDKIT_SNAPSHOT_DELETE, "one", NULL) < 0);
    CHECK(vdkit_snapshot(disk, 77, "one", NULL) == VDKIT_E_USAGE);
    OK(vdkit_bitmap(disk, VDKIT_BITMAP_ADD, "b", 65536, NULL));
    OK(vdkit_bitmap(disk, VDKIT_BITMAP_DISABLE, "b", 0, NULL));
    OK(vdkit_bitmap(disk, VDKIT_BITMAP_ENABLE, "b", 0, NULL));
    struct marked marked = { .disk = disk };
    OK(vdkit_bitmap_ranges(disk, "b", add_range, &marked));
    CHECK(marked.bytes == 0);
    OK(vdkit_pwrite(disk, "x", 1, MIB + 100000));
    OK(vdkit_pwrite(disk, "yz", 2, 3 * MIB - 1)); /* the end of one piece and the start of the next */
    OK(vdkit_bitmap_ranges(disk, "b", add_range, &marked));
    CHECK(marked.bytes == 3 * 65536 && marked.last == 3 * MIB - 65536);
    marked.stop = 1;
    CHECK(vdkit_bitmap_ranges(disk, "b", add_range, &marked) == VDKIT_E_INTERRUPTED);
    CHECK(marked.bytes == 4 * 65536 && marked.last == MIB + 65536);
    CHECK(vdkit_bitmap_ranges(disk, "none", add_range, &marked) == VDKIT_E_USAGE);
    CHECK(vdkit_bitmap_ranges(disk, "b", NULL, NULL) == VDKIT_E_USAGE);
    OK(vdkit_bitmap(disk, VDKIT_BITMAP_CLEAR, "b", 0, NULL));
    OK(vdkit_bitmap(disk, VDKIT_BITMAP_REMOVE, "b", 0, NULL));
    OK(vdkit_close(disk));

    /* By a descriptor, and through a raw file. */
    int fd = open("a.qcow2", O_RDWR);
    OK(vdkit_open_fd(fd, "my image", options, &disk));
    close(fd);
    OK(vdkit_pwrite(disk, "fd", 2, 0));
    OK(vdkit_close(disk));
    CHECK(vdkit_open_fd(-1, "no image", options, &disk) == VDKIT_E_USAGE);
    vdkit_open_options_free(options);
}

struct storage {
    char bytes[2 * MIB];
    int64_t len;
    int syncs;
    int fail_after, freed; /* calls until they fail; -1 for never */
    pthread_mutex_t lock;
};

static int faulty(struct storage *s)
{
    return s->fail_after >= 0 && s->fail_after-- == 0 ? (s->fail_after = 0, 1) : 0;
}

static int64_t s_size(void *user)
{
    return ((struct storage *)user)->len;
}

static int64_t s_pread(void *user, void *buf, size_t len, uint64_t offset)
{
    struct storage *s = user;
    int64_t got = -EIO;

    pthread_mutex_lock(&s->lock);
    if (!faulty(s)) {
        got = (int64_t)offset >= s->len ? 0 : s->len - (int64_t)offset;
        got = got > (int64_t)len ? (int64_t)len : got;
        memcpy(buf, s->bytes + offset, (size_t)got);
        if (got > 1)
            got = (got + 1) / 2; /* short reads are allowed */
    }
    pthread_mutex_unlock(&s->lock);
    return got;
}

static int s_pwrite(void *user, const void *buf, size_t len, uint64_t offset)
{
    struct storage *s = user;
    int result = -ENOSPC;

    pthread_mutex_lock(&s->lock);
    if (!faulty(s) && offset + len <= sizeof s->bytes) {
        memcpy(s->bytes + offset, buf, len);
        if ((int64_t)(offset + len) > s->len)
            s->len = (int64_t)(offset + len);
        result = 0;
    }
    pthread_mutex_unlock(&s->lock);
    return result;
}

static int s_set_size(void *user, uint64_t size)
{
    struct storage *s = user;

    if (faulty(s) || size > sizeof s->bytes)
        return -ENOSPC;
    if ((int64_t)size < s->len)
        memset(s->bytes + size, 0, (size_t)(s->len - (int64_t)size));
    s->len = (int64_t)size;
    return 0;
}

static int s_sync(void *user)
{
    ((struct storage *)user)->syncs++;
    return faulty(user) ? -EIO : 0;
}

static int s_never_durable(void *user)
{
    (void)user;
    return -EIO;
}

static int s_counts(void *user, const void *buf, size_t len, uint64_t offset)
{
    return s_pwrite(user, buf, len / 2, offset) ? -EIO : (int)(len / 2);
}

static int64_t s_ends(void *user, void *buf, size_t len, uint64_t offset)
{
    return offset < 100 ? s_pread(user, buf, len > 100 ? 100 : len, offset) : 0;
}

static void s_free(void *user)
{
    ((struct storage *)user)->freed++;
}

static const vdkit_storage_ops ops = {
    .struct_size = sizeof ops, .size = s_size, .pread = s_pread, .pwrite = s_pwrite,
    .sync = s_sync, .set_size = s_set_size, .free = s_free,
};

static void load(struct storage *s, const char *path)
{
    FILE *file = fopen(path, "rb");

    s->len = (int64_t)fread(s->bytes, 1, sizeof s->bytes, file);
    fclose(file);
    s->fail_after = -1;
    s->freed = 0;
}

/* A fault at each callback in turn: an error comes back, and everything is freed. */
static void callbacks(void)
{
    static struct storage s;
    vdkit_open_options *options = writing("qcow2");
    vdkit_disk *disk = NULL;
    char buf[512];
    int done = 0;

    pthread_mutex_init(&s.lock, NULL);
    OK(create("small.qcow2", "qcow2", MIB, "cluster_size=4K", NULL));
    for (int fault = 0; !done && fault < 500; fault++) {
        int result;

        load(&s, "small.qcow2");
        s.fail_after = fault;
        result = vdkit_open_storage(&ops, &s, "memory", options, &disk);
        if (result == 0) {
            memset(buf, 9, sizeof buf);
            result = vdkit_pwrite(disk, buf, sizeof buf, 4096 * 3 + 512);
            if (result == 0)
                result = vdkit_flush(disk);
            int closed = vdkit_close(disk);
            result = result ? result : closed;
        }
        CHECK(s.freed == 1);
        done = result == 0 && s.fail_after > 0;
        CHECK(done || result < 0 || s.fail_after == 0);
    }
    CHECK(done);
    s.fail_after = -1;
    OK(vdkit_open_storage(&ops, &s, "memory", NULL, &disk));
    OK(vdkit_pread(disk, buf, 512, 4096 * 3 + 512));
    CHECK(buf[0] == 9 && buf[511] == 9);
    OK(vdkit_convert_disk(disk, "out.raw", "raw", NULL, 0, NULL, NULL));
    CHECK(s.freed == 2);

    vdkit_storage_ops wrong = ops;
    wrong.struct_size = 0;
    CHECK(vdkit_open_storage(&wrong, &s, "memory", NULL, &disk) == VDKIT_E_USAGE);
    wrong = (vdkit_storage_ops){ .struct_size = sizeof wrong, .free = s_free };
    CHECK(vdkit_open_storage(&wrong, &s, "memory", NULL, &disk) == VDKIT_E_USAGE);
    CHECK(vdkit_open_storage(NULL, &s, "memory", NULL, &disk) == VDKIT_E_USAGE);
    CHECK(s.freed == 2);
    /* A count instead of 0, and an end before the end, are faults of the program. */
    load(&s, "small.qcow2");
    wrong = ops;
    wrong.pwrite = s_counts;
    OK(vdkit_open_storage(&wrong, &s, "memory", options, &disk));
    CHECK(vdkit_pwrite(disk, buf, sizeof buf, 0) < 0 || vdkit_flush(disk) < 0);
    CHECK(vdkit_close(disk) < 0);
    load(&s, "small.qcow2");
    wrong = ops;
    wrong.pread = s_ends;
    CHECK(vdkit_open_storage(&wrong, &s, "memory", NULL, &disk) == VDKIT_E_FAILED);
    vdkit_open_options_free(options);
}

/* A sync for all pieces of a write in writethrough; and no report beside an error. */
static void durable(void)
{
    static struct storage s;
    vdkit_open_options *options = writing("raw");
    vdkit_storage_ops wrong = ops;
    vdkit_disk *disk;
    vdkit_iovec pieces[3] = { { "a", 1 }, { "bc", 2 }, { "d", 1 } };
    char *report = NULL, buf[4];

    pthread_mutex_init(&s.lock, NULL);
    s.fail_after = -1;
    s.len = MIB;
    OK(vdkit_open_options_cache(options, "writethrough"));
    OK(vdkit_open_storage(&ops, &s, "memory", options, &disk));
    s.syncs = 0;
    OK(vdkit_pwritev(disk, pieces, 3, 100));
    CHECK(s.syncs == 1);
    OK(vdkit_pread(disk, buf, 4, 100));
    CHECK(memcmp(buf, "abcd", 4) == 0);
    OK(vdkit_close(disk));

    OK(vdkit_open_options_cache(options, "writeback"));
    wrong.sync = s_never_durable;
    OK(vdkit_open_storage(&wrong, &s, "memory", options, &disk));
    OK(vdkit_pwrite(disk, "e", 1, 0));
    CHECK(vdkit_convert_disk(disk, "whole.raw", "raw", NULL, 0, NULL, &report) == VDKIT_E_FAILED);
    CHECK(report == NULL && vdkit_error_errno() == EIO && access("whole.raw", F_OK) == 0);
    vdkit_open_options_free(options);
}

static vdkit_disk *shared;

static void *client(void *number)
{
    char buf[512], back[512];
    int id = (int)(intptr_t)number;

    for (int i = 0; i < 64; i++) {
        uint64_t at = (uint64_t)(id * 64 + i) * 4096;

        memset(buf, id + 1, sizeof buf);
        OK(vdkit_pwrite(shared, buf, sizeof buf, at));
        OK(vdkit_pread(shared, back, sizeof back, at));
        CHECK(memcmp(buf, back, sizeof buf) == 0);
        CHECK(vdkit_pread(shared, back, 1, 1ull << 40) < 0); /* each thread has an error of its own */
        CHECK(vdkit_error_code() != 0);
        if (i % 16 == 0)
            OK(vdkit_flush(shared));
    }
    return NULL;
}

static void threads(void)
{
    vdkit_open_options *options = writing("qcow2");
    pthread_t all[8];

    OK(vdkit_create("threads.qcow2", "qcow2", 4 * MIB, NULL, 0, NULL));
    OK(vdkit_open("threads.qcow2", options, &shared));
    for (int i = 0; i < 8; i++)
        pthread_create(&all[i], NULL, client, (void *)(intptr_t)i);
    for (int i = 0; i < 8; i++)
        pthread_join(all[i], NULL);
    OK(vdkit_close(shared));
    vdkit_open_options_free(options);
}

static void queue(void)
{
    static char buf[64][512];
    vdkit_open_options *options = writing("qcow2");
    vdkit_completion done[64];
    vdkit_queue *queue = NULL;
    vdkit_disk *disk = NULL;
    int reaped = 0;

    OK(vdkit_create("queue.qcow2", "qcow2", 4 * MIB, NULL, 0, NULL));
    OK(vdkit_open("queue.qcow2", options, &disk));
    OK(vdkit_queue_new(disk, 4, &queue));
    vdkit_queue *none = NULL;
    CHECK(vdkit_queue_new(disk, -1, &none) == VDKIT_E_USAGE);
    CHECK(vdkit_close(disk) == VDKIT_E_USAGE); /* the queue is there: the disk stays open */
    struct pollfd event = { .fd = vdkit_queue_fd(queue), .events = POLLIN };
    CHECK(poll(&event, 1, 0) == 0);
    CHECK(vdkit_queue_reap(queue, done, 64, -1) == 0); /* nothing is open */
    for (int i = 0; i < 64; i++) {
        memset(buf[i], i, 512);
        OK(vdkit_queue_pwrite(queue, buf[i], 512, (uint64_t)i * 65536, (uint64_t)i));
    }
    while (reaped < 64) {
        CHECK(poll(&event, 1, 10000) == 1);
        int got = vdkit_queue_reap(queue, done, 10, 0);
        CHECK(got > 0);
        for (int i = 0; i < got; i++)
            CHECK(done[i].result == 0 && done[i].cookie < 64);
        reaped += got > 0 ? got : 64;
    }
    CHECK(vdkit_queue_open(queue) == 0);
    CHECK(poll(&event, 1, 0) == 0);
    OK(vdkit_queue_flush(queue, 100));
    CHECK(vdkit_queue_reap(queue, done, 64, 10000) == 1 && done[0].cookie == 100);
    OK(vdkit_queue_pread(queue, buf[0], 512, 63 * 65536, 101));
    OK(vdkit_queue_pread(queue, buf[1], 512, 1ull << 40, 102)); /* beyond the end */
    for (reaped = 0; reaped < 2;) {
        CHECK(vdkit_queue_reap(queue, done, 1, -1) == 1);
        CHECK((done[0].cookie == 102) == (done[0].result < 0));
        reaped++;
    }
    CHECK(buf[0][0] == 63);
    CHECK(vdkit_pread(disk, buf[1], 512, 1ull << 40) == VDKIT_E_USAGE);
    CHECK(vdkit_error_file() && strcmp(vdkit_error_file(), "queue.qcow2") == 0);
    CHECK(vdkit_queue_pread(queue, NULL, 512, 0, 103) == VDKIT_E_USAGE);
    CHECK(vdkit_queue_write_zeroes(queue, 512, 0, 64, 103) == VDKIT_E_USAGE); /* an unknown flag */
    CHECK(vdkit_queue_open(queue) == 0);
    OK(vdkit_queue_pwrite(queue, NULL, 0, 0, 104)); /* nothing */
    CHECK(vdkit_queue_reap(queue, done, 1, -1) == 1 && done[0].result == 0);
    OK(vdkit_queue_write_zeroes(queue, 65536, 0, VDKIT_MAY_UNMAP, 1));
    OK(vdkit_queue_discard(queue, 65536, 65536, 2));
    vdkit_queue_free(queue); /* waits for both */
    OK(vdkit_pread(disk, buf[0], 512, 0));
    CHECK(buf[0][0] == 0);
    OK(vdkit_close(disk));
    vdkit_open_options_free(options);
}

/* The table of blocks moves while requests are open. */
static void resizing_in_use(void)
{
    static char buf[64][512];
    vdkit_open_options *options = writing("vhdx");
    vdkit_completion done;
    vdkit_queue *queue = NULL;
    vdkit_disk *disk = NULL;

    OK(create("grows.vhdx", "vhdx", 64 * MIB, "block_size=1M", NULL));
    OK(vdkit_open("grows.vhdx", options, &disk));
    OK(vdkit_queue_new(disk, 4, &queue));
    for (int i = 0; i < 64; i++) {
        memset(buf[i], i + 1, 512);
        OK(vdkit_queue_pwrite(queue, buf[i], 512, (uint64_t)i * MIB, (uint64_t)i));
    }
    OK(vdkit_resize(disk, 130ull << 30, 0, NULL));
    for (int i = 0; i < 64; i++)
        CHECK(vdkit_queue_reap(queue, &done, 1, -1) == 1 && done.result == 0);
    vdkit_queue_free(queue);
    OK(vdkit_resize(disk, 64 * MIB, VDKIT_SHRINK, NULL));
    OK(vdkit_close(disk));
    OK(vdkit_open("grows.vhdx", options, &disk));
    for (int i = 0; i < 64; i++) {
        OK(vdkit_pread(disk, buf[0], 512, (uint64_t)i * MIB));
        CHECK(buf[0][0] == i + 1 && buf[0][511] == i + 1);
    }
    OK(vdkit_close(disk));
    vdkit_open_options_free(options);
}

static int updates;

static int count_updates(void *user, uint64_t done, uint64_t total)
{
    CHECK(done <= total);
    __atomic_add_fetch(&updates, 1, __ATOMIC_RELAXED);
    return *(int *)user;
}

static void jobs(void)
{
    int stop = 0, equal = -1;
    vdkit_verdict verdict = { .struct_size = sizeof verdict };
    vdkit_monitor monitor = { .struct_size = sizeof monitor, .progress = count_updates, .user = &stop };
    uint64_t errors = 99, required = 0, full = 0;
    vdkit_disk *a = NULL, *b = NULL;
    char *report = NULL;

    OK(vdkit_convert("threads.qcow2", NULL, "copy.vmdk", "vmdk", NULL, VDKIT_CONVERT_VERIFY, &monitor,
                     &report));
    CHECK(updates > 0 && strstr(report, "virtual-size") != NULL);
    vdkit_free(report);
    vdkit_create_options *zstd;
    OK(vdkit_create_options_new(&zstd));
    OK(vdkit_create_options_add(zstd, "compression_type=zstd"));
    OK(vdkit_convert("threads.qcow2", NULL, "packed.qcow2", "qcow2", zstd, VDKIT_CONVERT_COMPRESS, NULL,
                     NULL));
    OK(vdkit_create("into.qcow2", "qcow2", 4 * MIB, NULL, 0, NULL));
    OK(vdkit_convert("threads.qcow2", NULL, "into.qcow2", NULL, NULL, VDKIT_CONVERT_INTO, NULL, NULL));
    CHECK(vdkit_convert("threads.qcow2", NULL, "into.qcow2", NULL, zstd, VDKIT_CONVERT_INTO, NULL, NULL) ==
          VDKIT_E_USAGE); /* it keeps its options */
    vdkit_create_options_free(zstd);
    stop = 1;
    CHECK(vdkit_convert("threads.qcow2", NULL, "never.raw", "raw", NULL, 0, &monitor, NULL) ==
          VDKIT_E_INTERRUPTED);
    CHECK(access("never.raw", F_OK) != 0);
    OK(vdkit_open("threads.qcow2", NULL, &a));
    for (const char **name = (const char *[]){ "copy.vmdk", "packed.qcow2", "into.qcow2", NULL }; *name;
         name++) {
        OK(vdkit_open(*name, NULL, &b));
        OK(vdkit_compare(a, b, 0, NULL, &equal, NULL));
        CHECK(equal == 1);
        OK(vdkit_close(b));
    }
    OK(vdkit_open("base.qcow2", NULL, &b));
    OK(vdkit_compare(a, b, VDKIT_COMPARE_STRICT, NULL, &equal, &report));
    CHECK(equal == 0);
    vdkit_free(report);
    OK(vdkit_close(b));
    OK(vdkit_close(a));
    OK(vdkit_check("threads.qcow2", NULL, VDKIT_REPAIR_NOTHING, NULL, &errors, &report));
    CHECK(errors == 0 && strstr(report, "corruptions") != NULL);
    vdkit_free(report);
    CHECK(vdkit_check("threads.qcow2", NULL, 9, NULL, NULL, NULL) == VDKIT_E_USAGE);
    OK(vdkit_measure("threads.qcow2", NULL, "qcow2", NULL, NULL, &required, &full));
    CHECK(required > 0 && full > required);
    OK(vdkit_compact("into.qcow2", NULL, NULL, NULL));
    OK(vdkit_inspect("threads.qcow2", "qcow2", 0, NULL, &verdict, &report));
    CHECK(verdict.verdict == VDKIT_ACCEPT && verdict.findings == 0 && verdict.virtual_size == 4 * MIB);
    CHECK(strcmp(verdict.format, "qcow2") == 0 && verdict.file_length > 0 && verdict.data_bytes > 0);
    vdkit_free(report);
    OK(vdkit_inspect("threads.qcow2", "vmdk", VDKIT_INSPECT_STRICT, NULL, &verdict, NULL));
    CHECK(verdict.verdict == VDKIT_REFUSE && verdict.findings > 0);
    verdict.struct_size = 1;
    CHECK(vdkit_inspect("threads.qcow2", NULL, 0, NULL, &verdict, NULL) == VDKIT_E_USAGE);
    CHECK(vdkit_inspect("threads.qcow2", NULL, 0, NULL, NULL, NULL) == VDKIT_E_USAGE);

    vdkit_open_options *options = writing("qcow2");
    OK(vdkit_open("top.qcow2", options, &a));
    OK(vdkit_pwrite(a, "top", 3, 0));
    OK(vdkit_close(a));
    vdkit_open_options_free(options);
    OK(vdkit_rebase("top.qcow2", NULL, NULL, NULL, 0, NULL, NULL));
    OK(vdkit_rebase("top.qcow2", NULL, "base.qcow2", "qcow2", 0, NULL, &report));
    vdkit_free(report);
    OK(vdkit_commit("top.qcow2", NULL, NULL, 0, NULL, &report));
    vdkit_free(report);
    char buf[3];
    OK(vdkit_open("base.qcow2", NULL, &a));
    OK(vdkit_pread(a, buf, 3, 0));
    CHECK(memcmp(buf, "top", 3) == 0);
    OK(vdkit_close(a));
}

/* Each job is ended by its monitor, and leaves all as it was. */
static void ended(void)
{
    int stop = 1, equal = -1;
    vdkit_verdict verdict = { .struct_size = sizeof verdict };
    vdkit_monitor monitor = { .struct_size = sizeof monitor, .progress = count_updates, .user = &stop };
    vdkit_create_options *new;
    vdkit_open_options *options = writing("qcow2");
    vdkit_disk *disk, *other;
    char *json;

    CHECK(vdkit_measure("threads.qcow2", NULL, "qcow2", NULL, &monitor, NULL, NULL) == VDKIT_E_INTERRUPTED);
    CHECK(vdkit_check("threads.qcow2", NULL, VDKIT_REPAIR_ALL, &monitor, NULL, NULL) == VDKIT_E_INTERRUPTED);
    CHECK(vdkit_compact("threads.qcow2", NULL, &monitor, NULL) == VDKIT_E_INTERRUPTED);
    CHECK(vdkit_inspect("threads.qcow2", NULL, 0, &monitor, &verdict, NULL) == VDKIT_E_INTERRUPTED);
    CHECK(verdict.verdict == VDKIT_UNKNOWN);
    OK(create("ended.qcow2", "qcow2", 0, NULL, "threads.qcow2"));
    OK(vdkit_open("ended.qcow2", options, &disk));
    OK(vdkit_pwrite(disk, "ended", 5, 0));
    OK(vdkit_close(disk));
    CHECK(vdkit_commit("ended.qcow2", NULL, NULL, 0, &monitor, NULL) == VDKIT_E_INTERRUPTED);
    CHECK(vdkit_rebase("ended.qcow2", NULL, NULL, NULL, 0, &monitor, NULL) == VDKIT_E_INTERRUPTED);
    OK(vdkit_open("ended.qcow2", NULL, &disk));
    OK(vdkit_open("threads.qcow2", NULL, &other));
    CHECK(vdkit_compare(disk, other, 0, &monitor, &equal, NULL) == VDKIT_E_INTERRUPTED);
    OK(vdkit_close(other));
    OK(vdkit_close(disk));
    OK(vdkit_create_options_new(&new));
    OK(vdkit_create_options_add(new, "preallocation=full"));
    CHECK(vdkit_create("never.qcow2", "qcow2", 4 * MIB, new, 0, &monitor) == VDKIT_E_INTERRUPTED);
    CHECK(access("never.qcow2", F_OK) != 0);
    vdkit_create_options_free(new);
    OK(vdkit_open("threads.qcow2", options, &disk));
    CHECK(vdkit_snapshot(disk, VDKIT_SNAPSHOT_CREATE, "never", &monitor) == VDKIT_E_INTERRUPTED);
    OK(vdkit_snapshots(disk, &json));
    CHECK(strcmp(json, "[]") == 0);
    vdkit_free(json);
    CHECK(vdkit_bitmap(disk, VDKIT_BITMAP_ADD, "never", 0, &monitor) == VDKIT_E_INTERRUPTED);
    CHECK(vdkit_bitmap(disk, VDKIT_BITMAP_REMOVE, "never", 0, NULL) == VDKIT_E_USAGE);
    OK(vdkit_close(disk));

    OK(vdkit_create_options_new(&new));
    OK(vdkit_create_options_add(new, "iter-time=10"));
    OK(vdkit_create_options_key(new, "first", 5));
    OK(vdkit_create("grows.luks", "luks", MIB, new, 0, NULL));
    vdkit_create_options_free(new);
    OK(vdkit_open_options_format(options, "luks"));
    OK(vdkit_open_options_add_key(options, "first", 5));
    OK(vdkit_open("grows.luks", options, &disk));
    CHECK(vdkit_resize(disk, 64 * MIB, 0, &monitor) == VDKIT_E_INTERRUPTED);
    CHECK(vdkit_size(disk) == MIB);
    stop = 0;
    OK(vdkit_resize(disk, 64 * MIB, 0, &monitor));
    OK(vdkit_close(disk));
    vdkit_open_options_free(options);
}

#include "keys.h"
#include "opening.h"
#include "serving.h"
#include "forking.h"
#include "watching.h"

/* Each kind of error has a code of its own. */
static void kinds_of_errors(void)
{
    vdkit_disk *disk;

    OK(vdkit_open("base.qcow2", NULL, &disk));
    CHECK(vdkit_pwrite(disk, "x", 1, 0) == VDKIT_E_READ_ONLY);
    OK(vdkit_close(disk));
    CHECK(vdkit_compact("copy.vmdk", NULL, NULL, NULL) == VDKIT_E_UNSUPPORTED);
}

/* The library handles no signals, and leaves SIGPIPE as it is. */
static void signals(void)
{
    for (int number = 1; number < 32; number++) {
        struct sigaction action;
        if (sigaction(number, NULL, &action) == 0)
            CHECK(action.sa_handler == SIG_DFL || action.sa_handler == SIG_IGN);
    }
    struct sigaction pipe;
    sigaction(SIGPIPE, NULL, &pipe);
    CHECK(pipe.sa_handler == SIG_DFL);
}

int main(int argc, char **argv)
{
    signal(SIGPIPE, SIG_DFL); /* who runs this may have ignored it */
    char *formats = vdkit_formats();

    CHECK(VDKIT_API_VERSION == 1 && strlen(vdkit_version()) > 2);
    CHECK(strstr(formats, "qcow2") != NULL);
    vdkit_free(formats);
    errors();
    judge();
    reading_and_writing();
    callbacks();
    durable();
    threads();
    queue();
    resizing_in_use();
    jobs();
    ended();
    ended_while_verifying();
    serving();
    serving_with_tls();
    serving_a_guest();
    amending();
    key_slots();
    encrypted_images();
    opening();
    kinds_of_errors();
    no_space();
    signals();
    (void)argv;
    if (argc == 1) { /* valgrind calls what other threads held lost, in a child */
        forked();
        forked_changes();
        forked_queue();
        forked_server();
    }
    if (!bad)
        puts("all good");
    return bad;
}
