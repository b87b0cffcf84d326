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
