/* An NBD server.  serve IMAGE ADDRESS   (unix:PATH or tcp:HOST:PORT); ends at the end of its input */
#include <stdio.h>
#include <vdkit.h>

int main(int argc, char **argv)
{
    vdkit_disk *disk;
    vdkit_server *server;

    if (argc != 3) {
        fprintf(stderr, "usage: serve IMAGE ADDRESS\n");
        return 2;
    }
    if (vdkit_open(argv[1], NULL, &disk) < 0 ||
        vdkit_serve_nbd(disk, argv[2], NULL, VDKIT_SERVE_READ_ONLY, &server) < 0) {
        fprintf(stderr, "%s\n", vdkit_error_message());
        return 1;
    }
    puts(vdkit_server_uri(server));
    fflush(stdout);
    while (getchar() != EOF)
        ;
    if (vdkit_server_stop(server, 1000) < 0) {
        fprintf(stderr, "%s\n", vdkit_error_message());
        return 1;
    }
    return 0;
}
