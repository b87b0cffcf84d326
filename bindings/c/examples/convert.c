/* Converts an image, with a progress bar.  convert SOURCE TARGET FORMAT */
#include <stdio.h>
#include <vdkit.h>

static int progress(void *user, uint64_t done, uint64_t total)
{
    int *shown = user;
    int tenths = total ? (int)(done * 40 / total) : 0;

    if (tenths != *shown) {
        *shown = tenths;
        fprintf(stderr, "\r[%-40.*s]", tenths, "########################################");
    }
    return 0; /* anything else ends the job */
}

int main(int argc, char **argv)
{
    int shown = -1;
    vdkit_monitor monitor = { .struct_size = sizeof monitor, .progress = progress, .user = &shown };
    char *report;

    if (argc != 4) {
        fprintf(stderr, "usage: convert SOURCE TARGET FORMAT\n");
        return 2;
    }
    if (vdkit_convert(argv[1], NULL, argv[2], argv[3], NULL, 0, &monitor, &report) < 0) {
        const char *hint = vdkit_error_hint();

        fprintf(stderr, "\n%s\n%s\n", vdkit_error_message(), hint ? hint : "");
        return 1;
    }
    fputc('\n', stderr);
    puts(report);
    vdkit_free(report);
    return 0;
}
