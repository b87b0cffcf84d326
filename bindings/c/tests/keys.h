/* A part of api.c: options of images that exist, their keys, and new images that are encrypted. */

static void amending(void)
{
    char *report = NULL;

    OK(create("old.qcow2", "qcow2", MIB, "compat=0.10", NULL));
    OK(vdkit_amend("old.qcow2", NULL, "compat=1.1", NULL, &report));
    CHECK(strstr(report, "\"compat\"") != NULL);
    vdkit_free(report);
    CHECK(vdkit_amend("old.qcow2", NULL, "nonsense=1", NULL, NULL) == VDKIT_E_USAGE);
    CHECK(vdkit_amend("old.qcow2", NULL, NULL, NULL, NULL) == VDKIT_E_USAGE);
}

/* What its monitor ends leaves the keys as they are. */
static void key_slots_ended(const vdkit_open_options *options)
{
    int stop = 1;
    vdkit_monitor monitor = { .struct_size = sizeof monitor, .progress = count_updates, .user = &stop };
    char *before = NULL, *json = NULL;

    OK(vdkit_keys("encrypted.qcow2", options, NULL, &before));
    CHECK(vdkit_keys("encrypted.qcow2", options, &monitor, &json) == VDKIT_E_INTERRUPTED && json == NULL);
    for (uint32_t flags = 0; flags <= VDKIT_KEY_REPLACE; flags++)
        CHECK(vdkit_key_add("encrypted.qcow2", options, "never", 5, 10, flags, &monitor, NULL) ==
              VDKIT_E_INTERRUPTED);
    CHECK(vdkit_key_remove("encrypted.qcow2", options, 1, 0, &monitor, NULL) == VDKIT_E_INTERRUPTED);
    OK(vdkit_keys("encrypted.qcow2", options, NULL, &json));
    CHECK(strcmp(before, json) == 0);
    vdkit_free(before);
    vdkit_free(json);
}

/* "encrypted.qcow2" has the key "first", says the program that runs this one. */
static void key_slots(void)
{
    vdkit_open_options *options = writing("qcow2");
    char *json = NULL;

    CHECK(vdkit_key_add("encrypted.qcow2", options, "second", 6, 10, 0, NULL, NULL) < 0);
    OK(vdkit_open_options_add_key(options, "first", 5));
    OK(vdkit_key_add("encrypted.qcow2", options, "second", 6, 10, 0, NULL, NULL));
    OK(vdkit_keys("encrypted.qcow2", options, NULL, &json));
    CHECK(strstr(json, "\"opened\":[0]") != NULL);
    vdkit_free(json);
    OK(vdkit_key_add("encrypted.qcow2", options, "third", 5, 10, VDKIT_KEY_REPLACE, NULL, NULL));
    CHECK(vdkit_key_add("encrypted.qcow2", options, "fourth", 6, 10, 0, NULL, NULL) < 0);
    vdkit_open_options_free(options);
    options = writing("qcow2");
    OK(vdkit_open_options_add_key(options, "third", 5));
    key_slots_ended(options);
    CHECK(vdkit_key_remove("encrypted.qcow2", options, 1, 0x80, NULL, NULL) == VDKIT_E_USAGE);
    OK(vdkit_key_remove("encrypted.qcow2", options, 1, 0, NULL, &json));
    CHECK(strstr(json, "\"removed-slots\":[1]") != NULL);
    vdkit_free(json);
    CHECK(vdkit_keys("old.qcow2", options, NULL, &json) < 0 && json == NULL);
    vdkit_open_options_free(options);
}

/* Encrypted images are made, stand on one another, and are converted into; nothing is left of a failure. */
static void encrypted_images(void)
{
    vdkit_create_options *options;
    vdkit_open_options *opening = writing("qcow2");
    vdkit_disk *disk;
    char buf[6];

    OK(vdkit_create_options_new(&options));
    OK(vdkit_create_options_key(options, "first", 5));
    CHECK(vdkit_create("luks.qcow2", "qcow2", MIB, options, 0, NULL) == VDKIT_E_USAGE); /* not encrypted */
    OK(vdkit_create_options_add(options, "encrypt.format=luks,encrypt.iter-time=10"));
    OK(vdkit_create("luks.qcow2", "qcow2", MIB, options, 0, NULL));
    CHECK(vdkit_open("luks.qcow2", NULL, &disk) == VDKIT_E_KEY);
    OK(vdkit_open_options_add_key(opening, "wrong", 5));
    CHECK(vdkit_open("luks.qcow2", opening, &disk) == VDKIT_E_KEY);
    OK(vdkit_open_options_add_key(opening, "first", 5));
    OK(vdkit_open("luks.qcow2", opening, &disk));
    OK(vdkit_pwrite(disk, "secret", 6, 4096));
    OK(vdkit_close(disk));

    OK(vdkit_create_options_backing(options, "luks.qcow2", "qcow2", opening));
    OK(vdkit_create("over.qcow2", "qcow2", 0, options, 0, NULL));
    OK(vdkit_convert("over.qcow2", opening, "copy.qcow2", "qcow2", options, VDKIT_CONVERT_VERIFY, NULL, NULL));
    OK(vdkit_open("copy.qcow2", opening, &disk));
    OK(vdkit_pread(disk, buf, 6, 4096));
    CHECK(memcmp(buf, "secret", 6) == 0);
    OK(vdkit_close(disk));
    OK(vdkit_create_options_backing(options, "luks.qcow2", "qcow2", NULL));
    OK(vdkit_create("none.qcow2", "qcow2", 0, options, 0, NULL)); /* its size needs no key */
    vdkit_create_options_free(options);

    OK(vdkit_create_options_new(&options));
    OK(vdkit_create_options_key(options, "first", 5));
    OK(vdkit_convert("base.qcow2", NULL, "luks.qcow2", NULL, options, VDKIT_CONVERT_INTO, NULL, NULL));
    /* Who gives a key expects that what is written is encrypted. */
    OK(vdkit_create("plain.qcow2", "qcow2", 4 * MIB, NULL, 0, NULL));
    OK(vdkit_create("plain.raw", "raw", 4 * MIB, NULL, 0, NULL));
    for (int raw = 0; raw < 2; raw++) {
        const char *plain = raw ? "plain.raw" : "plain.qcow2";
        char first[3] = "?";
        CHECK(vdkit_convert("base.qcow2", NULL, plain, raw ? "raw" : NULL, options, VDKIT_CONVERT_INTO,
                            NULL, NULL) == VDKIT_E_USAGE);
        CHECK(strcmp(vdkit_error_file(), plain) == 0);
        OK(vdkit_open(plain, NULL, &disk));
        OK(vdkit_pread(disk, first, 3, 0));
        CHECK(memcmp(first, "\0\0\0", 3) == 0);
        OK(vdkit_close(disk));
    }
    vdkit_create_options_free(options);
    vdkit_open_options_free(opening);
}
