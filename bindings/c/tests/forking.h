/* A part of api.c: what a child of fork() may do with what it inherits. */

/* A child of fork() may use what it opens itself, and what it inherits does not lose its locks. */
static void forked(void)
{
    vdkit_open_options *options = writing("qcow2");
    vdkit_disk *held, *other;
    int status = -1;

    OK(vdkit_open("taken.qcow2", options, &held));
    pid_t child = fork();
    if (child == 0) {
        vdkit_disk *disk;
        vdkit_close(held);
        _exit(vdkit_open("base.qcow2", NULL, &disk) == 0 && vdkit_close(disk) == 0 ? 0 : 1);
    }
    CHECK(waitpid(child, &status, 0) == child && status == 0);
    CHECK(vdkit_open("taken.qcow2", options, &other) == VDKIT_E_LOCKED);
    OK(vdkit_close(held));
    vdkit_open_options_free(options);
}

/* A child frees its copies of a queue and of the disk beneath, though the queue's threads are its parent's. */
static void forked_queue(void)
{
    vdkit_open_options *options = writing("qcow2");
    vdkit_disk *disks[2];
    vdkit_queue *queues[2];
    int status = -1;

    OK(vdkit_open("taken.qcow2", options, &disks[0]));
    OK(vdkit_open("base.qcow2", NULL, &disks[1]));
    for (int i = 0; i < 2; i++)
        OK(vdkit_queue_new(disks[i], 2, &queues[i]));
    pid_t child = fork();
    if (child == 0) {
        for (int i = 0; i < 2; i++)
            vdkit_queue_free(queues[i]);
        if (vdkit_close(disks[0]) != VDKIT_E_USAGE || !strstr(vdkit_error_message(), "parent"))
            _exit(1);
        _exit(vdkit_close(disks[1]) == 0 ? 0 : 2);
    }
    CHECK(waitpid(child, &status, 0) == child && status == 0);
    for (int i = 0; i < 2; i++) {
        vdkit_queue_free(queues[i]);
        OK(vdkit_close(disks[i]));
    }
    vdkit_open_options_free(options);
}

/* A child that stops a server of its parent frees its copy, and the server goes on. */
static void forked_server(void)
{
    vdkit_server *servers[2];
    vdkit_disk *disk;
    char buf[3];
    int status = -1;

    OK(vdkit_open("base.qcow2", NULL, &disk));
    OK(vdkit_serve_nbd(disk, "unix:forked.sock", NULL, VDKIT_SERVE_READ_ONLY, &servers[0]));
    OK(vdkit_open("base.qcow2", NULL, &disk));
    OK(vdkit_serve_vhost_user(disk, "guest.sock", VDKIT_SERVE_READ_ONLY, &servers[1]));
    pid_t child = fork();
    if (child == 0) {
        alarm(60); /* a thread of the parent that is waited for here never ends */
        for (int i = 0; i < 2; i++)
            if (vdkit_server_stop(servers[i], 0) != VDKIT_E_USAGE)
                _exit(1);
        _exit(0);
    }
    CHECK(waitpid(child, &status, 0) == child && status == 0);
    CHECK(access("guest.sock", F_OK) == 0);
    OK(vdkit_open(vdkit_server_uri(servers[0]), NULL, &disk));
    OK(vdkit_pread(disk, buf, 3, 0));
    CHECK(memcmp(buf, "top", 3) == 0);
    OK(vdkit_close(disk));
    for (int i = 0; i < 2; i++)
        OK(vdkit_server_stop(servers[i], 1000));
}

/* A child that changes snapshots or bitmaps would use clusters that its parent uses too. */
static int changes_in_child(vdkit_disk *disk)
{
    vdkit_server *server;
    char *json;

    for (uint32_t action = VDKIT_SNAPSHOT_CREATE; action <= VDKIT_SNAPSHOT_DELETE; action++)
        if (vdkit_snapshot(disk, action, action == VDKIT_SNAPSHOT_CREATE ? "new" : "kept", NULL) !=
                VDKIT_E_USAGE ||
            !strstr(vdkit_error_message(), "parent"))
            return 1;
    for (uint32_t action = VDKIT_BITMAP_ADD; action <= VDKIT_BITMAP_DISABLE; action++)
        if (vdkit_bitmap(disk, action, action == VDKIT_BITMAP_ADD ? "new" : "marks", 0, NULL) !=
                VDKIT_E_USAGE ||
            !strstr(vdkit_error_message(), "parent"))
            return 2;
    if (vdkit_snapshots(disk, &json) != 0 || !strstr(json, "kept"))
        return 3;
    if (vdkit_serve_nbd(disk, "unix:child.sock", NULL, 0, &server) != VDKIT_E_USAGE ||
        access("child.sock", F_OK) == 0)
        return 4;
    return 0;
}

static void forked_changes(void)
{
    vdkit_open_options *options = writing("qcow2");
    vdkit_disk *disk;
    uint64_t errors = 99;
    int status = -1;

    OK(create("changed.qcow2", "qcow2", 4 * MIB, "cluster_size=4K", NULL));
    OK(vdkit_open("changed.qcow2", options, &disk));
    OK(vdkit_pwrite(disk, "old", 3, 0));
    OK(vdkit_snapshot(disk, VDKIT_SNAPSHOT_CREATE, "kept", NULL));
    OK(vdkit_bitmap(disk, VDKIT_BITMAP_ADD, "marks", 0, NULL));
    pid_t child = fork();
    if (child == 0)
        _exit(changes_in_child(disk));
    CHECK(waitpid(child, &status, 0) == child && status == 0);
    OK(vdkit_pwrite(disk, "new", 3, MIB));
    OK(vdkit_snapshot(disk, VDKIT_SNAPSHOT_CREATE, "second", NULL));
    OK(vdkit_close(disk));
    OK(vdkit_check("changed.qcow2", NULL, VDKIT_REPAIR_NOTHING, NULL, &errors, NULL));
    CHECK(errors == 0);
    vdkit_open_options_free(options);
}
