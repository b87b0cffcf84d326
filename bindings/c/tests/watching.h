/* A part of api.c: a job's monitor. */

struct seen {
    uint64_t done, total, stop_beyond;
};

/* Ends the job beyond some number of bytes; the figures never go back. */
static int watch(void *user, uint64_t done, uint64_t total)
{
    struct seen *seen = user;

    CHECK(done >= seen->done && done <= total);
    seen->done = done;
    seen->total = total;
    return done > seen->stop_beyond;
}

/* The monitor is asked while the copy is read back, too. */
static void ended_while_verifying(void)
{
    struct seen seen = { .stop_beyond = 4 * MIB };
    vdkit_monitor monitor = { .struct_size = sizeof monitor, .progress = watch, .user = &seen };

    CHECK(vdkit_convert("threads.qcow2", NULL, "never.raw", "raw", NULL, VDKIT_CONVERT_VERIFY, &monitor,
                        NULL) == VDKIT_E_INTERRUPTED);
    CHECK(access("never.raw", F_OK) != 0);
    seen = (struct seen){ .stop_beyond = 8 * MIB };
    OK(vdkit_convert("threads.qcow2", NULL, "verified.raw", "raw", NULL, VDKIT_CONVERT_VERIFY, &monitor,
                     NULL));
    CHECK(seen.done == 8 * MIB && seen.total == 8 * MIB);
}
