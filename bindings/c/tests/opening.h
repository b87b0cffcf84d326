/* A part of api.c: what options of opening change. */

static int reads(const char *path, const vdkit_open_options *options, const char *text)
{
    vdkit_disk *disk;
    char buf[3];

    if (vdkit_open(path, options, &disk) != 0)
        return 0;
    OK(vdkit_pread(disk, buf, 3, 0));
    OK(vdkit_close(disk));
    return memcmp(buf, text, 3) == 0;
}

/* A pipe that nobody writes to: opening it again would wait for a writer. */
static void opening_a_pipe(void)
{
    vdkit_disk *disk;

    CHECK(mkfifo("pipe", 0600) == 0);
    int fd = open("pipe", O_RDONLY | O_NONBLOCK);
    alarm(60);
    CHECK(vdkit_open_fd(fd, "pipe", NULL, &disk) < 0 && disk == NULL);
    alarm(0);
    close(fd);
}

/* A list of options, and a line break in a name, stay out of the message. */
static void messages_of_one_line(void)
{
    vdkit_create_options *options;
    vdkit_disk *disk;

    OK(vdkit_create_options_new(&options));
    OK(vdkit_create_options_add(options, "nonsense=1"));
    CHECK(vdkit_create("lines.qcow2", "qcow2", MIB, options, 0, NULL) == VDKIT_E_USAGE);
    CHECK(strstr(vdkit_error_message(), "nonsense") && !strchr(vdkit_error_message(), '\n'));
    CHECK(vdkit_error_hint() && strstr(vdkit_error_hint(), "cluster_size"));
    vdkit_create_options_free(options);
    CHECK(vdkit_open("two\nlines.qcow2", NULL, &disk) == VDKIT_E_NOT_FOUND);
    CHECK(strstr(vdkit_error_message(), "two\\nlines.qcow2: ") && !strchr(vdkit_error_message(), '\n'));
    CHECK(strstr(vdkit_error_message(), "No such file"));
    CHECK(strcmp(vdkit_error_file(), "two\nlines.qcow2") == 0);
}

static void opening(void)
{
    vdkit_open_options *options, *writable = writing("qcow2");
    vdkit_create_options *over;
    vdkit_disk *disk, *second = NULL;

    OK(vdkit_create("open.qcow2", "qcow2", MIB, NULL, 0, NULL));
    OK(vdkit_open("open.qcow2", writable, &disk));
    OK(vdkit_pwrite(disk, "old", 3, 0));
    OK(vdkit_snapshot(disk, VDKIT_SNAPSHOT_CREATE, "s", NULL));
    OK(vdkit_pwrite(disk, "new", 3, 0));
    OK(vdkit_flush(disk));

    /* Another process' image would be locked in the same way. */
    OK(vdkit_open_options_new(&options));
    CHECK(vdkit_open("open.qcow2", writable, &second) < 0 && second == NULL);
    CHECK(vdkit_open("open.qcow2", options, &second) < 0);
    OK(vdkit_open_options_lock(options, 0));
    CHECK(reads("open.qcow2", options, "new"));
    OK(vdkit_close(disk));
    OK(vdkit_open_options_lock(options, 1));

    OK(vdkit_open_options_snapshot(options, "s"));
    CHECK(reads("open.qcow2", options, "old"));
    OK(vdkit_open_options_snapshot(options, "none"));
    CHECK(vdkit_open("open.qcow2", options, &disk) < 0);
    OK(vdkit_open_options_snapshot(options, NULL));
    CHECK(reads("open.qcow2", options, "new"));

    OK(vdkit_create_options_new(&over));
    OK(vdkit_create_options_backing(over, "open.qcow2", "qcow2", NULL));
    OK(vdkit_create("over-open.qcow2", "qcow2", 0, over, 0, NULL));
    vdkit_create_options_free(over);
    OK(vdkit_create("other.raw", "raw", MIB, NULL, 0, NULL));
    CHECK(reads("over-open.qcow2", options, "new"));
    OK(vdkit_open_options_backing(options, "", NULL));
    CHECK(reads("over-open.qcow2", options, "\0\0\0"));
    OK(vdkit_open_options_backing(options, "other.raw", "raw"));
    CHECK(reads("over-open.qcow2", options, "\0\0\0"));
    OK(vdkit_open_options_backing(options, NULL, NULL));
    CHECK(reads("over-open.qcow2", options, "new"));
    vdkit_open_options_free(options);
    vdkit_open_options_free(writable);
    opening_a_pipe();
    messages_of_one_line();
}
