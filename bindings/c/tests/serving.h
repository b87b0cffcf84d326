/* A part of api.c: disks that servers take over. */

/* What takes a disk over makes durable what was written before, also when it fails. */
static void taken_over(void)
{
    vdkit_open_options *options = writing("qcow2");
    vdkit_server *server;
    vdkit_disk *disk;
    char buf[5];

    for (int how = 0; how < 3; how++) {
        OK(vdkit_create("taken.qcow2", "qcow2", MIB, NULL, VDKIT_CREATE_REPLACE, NULL));
        OK(vdkit_open("taken.qcow2", options, &disk));
        OK(vdkit_pwrite(disk, "taken", 5, 4096));
        if (how == 0)
            OK(vdkit_convert_disk(disk, "taken.raw", "raw", NULL, 0, NULL, NULL));
        else if (how == 1)
            CHECK(vdkit_convert_disk(disk, "no/folder", "raw", NULL, 0, NULL, NULL) < 0);
        else
            CHECK(vdkit_serve_nbd(disk, "unix:no/folder", NULL, 0, &server) < 0);
        OK(vdkit_open("taken.qcow2", NULL, &disk));
        OK(vdkit_pread(disk, buf, 5, 4096));
        CHECK(memcmp(buf, "taken", 5) == 0);
        OK(vdkit_close(disk));
    }
    vdkit_open_options_free(options);
}

static void serving(void)
{
    vdkit_server *server = NULL;
    vdkit_disk *disk = NULL, *remote = NULL;
    char buf[3];

    OK(vdkit_open("base.qcow2", NULL, &disk));
    OK(vdkit_serve_nbd(disk, "unix:nbd.sock", NULL, VDKIT_SERVE_READ_ONLY, &server));
    OK(vdkit_open(vdkit_server_uri(server), NULL, &remote));
    CHECK(vdkit_server_clients(server) > 0);
    OK(vdkit_pread(remote, buf, 3, 0));
    CHECK(memcmp(buf, "top", 3) == 0);
    OK(vdkit_close(remote));
    OK(vdkit_server_stop(server, 1000));
    OK(vdkit_open("base.qcow2", NULL, &disk));
    CHECK(vdkit_serve_nbd(disk, "nonsense", NULL, 0, &server) == VDKIT_E_USAGE);
    CHECK(server == NULL);
    server = (vdkit_server *)buf;
    CHECK(vdkit_serve_nbd(NULL, "unix:nbd.sock", NULL, 0, &server) == VDKIT_E_USAGE);
    CHECK(server == NULL);
    /* Without a place for the server the disk is closed all the same: its lock is free. */
    {
        vdkit_open_options *writable;

        OK(vdkit_open_options_new(&writable));
        OK(vdkit_open_options_writable(writable, 1));
        OK(vdkit_open("base.qcow2", writable, &disk));
        CHECK(vdkit_serve_nbd(disk, "unix:nbd.sock", NULL, 0, NULL) == VDKIT_E_USAGE);
        OK(vdkit_open("base.qcow2", writable, &disk));
        OK(vdkit_close(disk));
        vdkit_open_options_free(writable);
    }
    taken_over();
}

/* "pki" has certificates for localhost, says the program that runs this one. */
static void serving_with_tls(void)
{
    vdkit_server *server = NULL;
    vdkit_disk *disk = NULL, *remote = NULL;
    char buf[3];

    OK(vdkit_open("base.qcow2", NULL, &disk));
    OK(vdkit_serve_nbd_tls(disk, "unix:tls.sock", NULL, "pki", VDKIT_SERVE_READ_ONLY, &server));
    CHECK(strncmp(vdkit_server_uri(server), "nbds+unix:", 10) == 0);
    CHECK(vdkit_open("nbd+unix:///?socket=tls.sock", NULL, &remote) < 0);
    CHECK(vdkit_open("nbds+unix:///?socket=tls.sock", NULL, &remote) < 0);
    OK(vdkit_open("nbds+unix:///?socket=tls.sock&tls-certificates=pki", NULL, &remote));
    OK(vdkit_pread(remote, buf, 3, 0));
    CHECK(memcmp(buf, "top", 3) == 0);
    OK(vdkit_close(remote));
    OK(vdkit_server_stop(server, 1000));
    OK(vdkit_open("base.qcow2", NULL, &disk));
    CHECK(vdkit_serve_nbd_tls(disk, "unix:tls.sock", NULL, "nowhere", 0, &server) == VDKIT_E_NOT_FOUND);
    CHECK(server == NULL && strcmp(vdkit_error_file(), "nowhere") == 0);
}

/* A monitor may connect by vhost-user, and is told the device's features. */
static void serving_a_guest(void)
{
    struct sockaddr_un address = { .sun_family = AF_UNIX, .sun_path = "guest.sock" };
    struct { uint32_t request, flags, size; } get_features = { 1, 1, 0 }, answer;
    uint64_t features = 0;
    vdkit_server *server = NULL;
    vdkit_disk *disk = NULL;
    int monitor = socket(AF_UNIX, SOCK_STREAM, 0);

    OK(vdkit_open("base.qcow2", NULL, &disk));
    OK(vdkit_serve_vhost_user(disk, "guest.sock", VDKIT_SERVE_READ_ONLY, &server));
    CHECK(strncmp(vdkit_server_uri(server), "vhost-user:/", 12) == 0);
    CHECK(vdkit_server_clients(server) == 0);
    CHECK(connect(monitor, (struct sockaddr *)&address, sizeof address) == 0);
    CHECK(write(monitor, &get_features, sizeof get_features) == sizeof get_features);
    CHECK(recv(monitor, &answer, sizeof answer, MSG_WAITALL) == sizeof answer && answer.size == 8);
    CHECK(recv(monitor, &features, 8, MSG_WAITALL) == 8 && features >> 5 & 1); /* read only */
    CHECK(vdkit_server_clients(server) == 1);
    close(monitor);
    OK(vdkit_server_stop(server, 1000));
    OK(vdkit_open("base.qcow2", NULL, &disk));
    CHECK(vdkit_serve_vhost_user(disk, "no/folder/sock", 0, &server) == VDKIT_E_NOT_FOUND);
    CHECK(server == NULL && vdkit_error_errno() == ENOENT);
}

/* A client whose write finds no space is told so, if the server shall not wait. */
static void no_space(void)
{
    static struct storage s;
    static char buf[65536];
    vdkit_open_options *options = writing("qcow2");
    vdkit_server *server;
    vdkit_disk *disk, *remote;
    int result = 0;

    pthread_mutex_init(&s.lock, NULL);
    OK(vdkit_create("large.qcow2", "qcow2", 8 * MIB, NULL, 0, NULL));
    load(&s, "large.qcow2");
    OK(vdkit_open_storage(&ops, &s, "memory", options, &disk));
    OK(vdkit_serve_nbd(disk, "unix:full.sock", NULL, VDKIT_SERVE_REPORT_NO_SPACE, &server));
    OK(vdkit_open_options_format(options, "raw"));
    OK(vdkit_open(vdkit_server_uri(server), options, &remote));
    memset(buf, 1, sizeof buf);
    for (uint64_t at = 0; result == 0 && at < 8 * MIB; at += sizeof buf)
        result = vdkit_pwrite(remote, buf, sizeof buf, at);
    CHECK(result == VDKIT_E_NO_SPACE);
    vdkit_close(remote);
    vdkit_server_stop(server, 1000);
    vdkit_open_options_free(options);
}
