/* libvdkit: disk images in C programs. Made from bindings/c/src by `make c-header`.
 *
 * Results: functions that can fail return 0 for success or one of the negative VDKIT_E_ codes
 * (vdkit_queue_reap() a count). vdkit_error_message() and its kin then tell more, for the calling thread,
 * until that thread's next call of such a function; others, such as those that free, change nothing.
 * After an error, a place for a handle or a string holds NULL. Reports, and what else may be NULL, are
 * then unchanged.
 * Ownership: what a function hands out is freed by the function that its comment names. Strings that
 * are passed in are UTF-8 and are copied; NULL is allowed where a comment says so. Paths may have any
 * bytes, where the parameter is called path, source, target, overlay or credentials.
 * Threads: every function may be called from any thread. One vdkit_disk may be used from many threads
 * at once; vdkit_close must be the last call. Callbacks may call libvdkit, but for what their comments
 * say.
 * Fork: a child opens its own disks, and does not use those of its parent. A daemon forks first, and
 * opens and serves afterwards.
 * Offsets and lengths are in bytes of the guest disk.
 */

#ifndef VDKIT_H
#define VDKIT_H

#include <stddef.h>
#include <stdint.h>

/* Rises when functions are added; programs compiled against an older one keep working. */
#define VDKIT_API_VERSION 1

// For vdkit_create(): an existing file is replaced.
#define VDKIT_CREATE_REPLACE 1

// For vdkit_write_zeroes(): the space may be freed.
#define VDKIT_MAY_UNMAP 1

// For vdkit_resize(): the disk may become smaller, and what lies beyond is lost.
#define VDKIT_SHRINK 1

// In vdkit_extent: the bytes read as zero.
#define VDKIT_EXTENT_ZERO 1

// In vdkit_extent: space is allocated for the bytes.
#define VDKIT_EXTENT_ALLOCATED 2

// In vdkit_extent: the bytes are compressed.
#define VDKIT_EXTENT_COMPRESSED 4

// In vdkit_extent: `host_file` and `host_offset` say where the bytes lie.
#define VDKIT_EXTENT_HOST 8

// Any other error, such as an I/O error.
#define VDKIT_E_FAILED -1

// The call makes no sense: a NULL pointer, an unknown name, a range beyond the disk.
#define VDKIT_E_USAGE -2

// The image is damaged, or its chain is incomplete.
#define VDKIT_E_CORRUPT -3

// The policy for references forbids it, or other images would be damaged.
#define VDKIT_E_REFUSED -4

// Another process uses the file.
#define VDKIT_E_LOCKED -5

// No space is left.
#define VDKIT_E_NO_SPACE -6

// A callback ended the work.
#define VDKIT_E_INTERRUPTED -7

// A bug in libvdkit; the message is for its authors.
#define VDKIT_E_PANIC -8

// It needs more memory or work than the limits allow; the image may be sound.
#define VDKIT_E_LIMIT -9

// The image is encrypted, and there is no key for it or a wrong one.
#define VDKIT_E_KEY -10

// The image uses a feature that is not supported, or its format lacks one.
#define VDKIT_E_UNSUPPORTED -11

// It was opened for reading only.
#define VDKIT_E_READ_ONLY -12

// A file is not there.
#define VDKIT_E_NOT_FOUND -13

// In vdkit_verdict: nothing speaks against the image.
#define VDKIT_ACCEPT 0

// In vdkit_verdict: do not use it.
#define VDKIT_REFUSE 1

// In vdkit_verdict: it could not be judged, so do not use it.
#define VDKIT_UNKNOWN 2

// For vdkit_inspect(): findings that only warn refuse the image too.
#define VDKIT_INSPECT_STRICT 1

// For vdkit_convert(): compress the new image's clusters.
#define VDKIT_CONVERT_COMPRESS 1

// For vdkit_convert(): read everything back and compare. The bytes of the disk are then counted twice in
// `total`.
#define VDKIT_CONVERT_VERIFY 2

// For vdkit_convert(): write into an existing image, file or device, which keeps its format.
#define VDKIT_CONVERT_INTO 4

// For vdkit_check(): only reports.
#define VDKIT_REPAIR_NOTHING 0

// For vdkit_check(): frees leaked space.
#define VDKIT_REPAIR_LEAKS 1

// For vdkit_check(): repairs all damage that can be repaired.
#define VDKIT_REPAIR_ALL 2

// For vdkit_compare(): disks of different sizes differ, also if the rest of the longer one is zero.
#define VDKIT_COMPARE_STRICT 1

// For vdkit_commit() and vdkit_rebase(): also if images or snapshots that depend on it are damaged. For
// vdkit_key_remove(): also if no given key opens another slot.
#define VDKIT_FORCE 1

// For vdkit_rebase(): changes only the name in the header, so that the disk may change.
#define VDKIT_HEADER_ONLY 2

// For vdkit_snapshot(): takes one.
#define VDKIT_SNAPSHOT_CREATE 0

// For vdkit_snapshot(): takes the disk back to it.
#define VDKIT_SNAPSHOT_APPLY 1

// For vdkit_snapshot(): deletes it.
#define VDKIT_SNAPSHOT_DELETE 2

// For vdkit_bitmap(): adds one that records from now on.
#define VDKIT_BITMAP_ADD 0

// For vdkit_bitmap(): removes it.
#define VDKIT_BITMAP_REMOVE 1

// For vdkit_bitmap(): clears it.
#define VDKIT_BITMAP_CLEAR 2

// For vdkit_bitmap(): records from now on.
#define VDKIT_BITMAP_ENABLE 3

// For vdkit_bitmap(): records no more.
#define VDKIT_BITMAP_DISABLE 4

// For vdkit_key_add(): the key of `opening` goes, once the new one opens the image.
#define VDKIT_KEY_REPLACE 1

// For vdkit_serve_nbd() and its kin: clients may not write.
#define VDKIT_SERVE_READ_ONLY 1

// For vdkit_serve_nbd() and its kin: a request for which no space is left fails. Without it, the request
// waits until there is space.
#define VDKIT_SERVE_REPORT_NO_SPACE 2

// What a new image shall be, beside its format and size. New ones have no options of the format, no key
// and no backing image. One may be used by many threads at once, but not while another thread changes it.
typedef struct vdkit_create_options vdkit_create_options;

// An open disk: an image with the images that it stands on. May be used from many threads at once.
typedef struct vdkit_disk vdkit_disk;

// How to open an image. New ones open for reading, with locks, with the format found in the file, and
// follow references only within the image's own folder. One may be used to open from many threads at
// once, but not while another thread changes it.
typedef struct vdkit_open_options vdkit_open_options;

// Requests of one disk in the background. May be used from many threads at once.
typedef struct vdkit_queue vdkit_queue;

// A running server. May be asked from many threads at once; vdkit_server_stop() must be the last call.
typedef struct vdkit_server vdkit_server;

// How a program watches a job, and ends it. The functions are called from any thread, `progress` from
// one at a time, and must be quick. They must not use the disk on which the job works: it may wait for
// them. NULL may be given for the whole and for each function.
typedef struct {
  // sizeof(vdkit_monitor), so that later versions can add members.
  size_t struct_size;
  // `done` of `total` bytes are finished; `total` may grow. Anything but 0 ends the job with
  // VDKIT_E_INTERRUPTED.
  int (*progress)(void *user, uint64_t done, uint64_t total);
  // A note for the user.
  void (*message)(void *user, const char *text);
  // Passed to both.
  void *user;
} vdkit_monitor;

// A piece of memory: laid out as struct iovec of <sys/uio.h>, which may be passed for it.
typedef struct {
  // Where it begins.
  void *base;
  // Bytes.
  size_t len;
} vdkit_iovec;

// A run of bytes of a disk.
typedef struct {
  // Bytes of this struct in the library that is loaded. Later versions add members at the end: what
  // lies beyond this size is not there.
  size_t struct_size;
  // Offset of the first byte on the disk.
  uint64_t offset;
  // Bytes; never 0.
  uint64_t length;
  // Offset in `host_file`, for a compressed run that of its cluster.
  uint64_t host_offset;
  // The file that holds the bytes, or NULL; valid during the callback.
  const char *host_file;
  // The image that holds the bytes: 0 for the one that was opened, 1 for its backing image, ...
  uint32_t depth;
  // VDKIT_EXTENT_ZERO, ...
  uint32_t flags;
} vdkit_extent;

// Called for each extent, by the thread that walks; a result other than 0 ends the walk. It may use the disk,
// but not close it.
typedef int (*vdkit_extent_fn)(void *user, const vdkit_extent *extent);

// What vdkit_inspect() found.
typedef struct {
  // sizeof(vdkit_verdict), set by the program, so that later versions can add members.
  size_t struct_size;
  // VDKIT_ACCEPT, VDKIT_REFUSE or VDKIT_UNKNOWN.
  int verdict;
  // How many findings there are; the report lists them.
  uint32_t findings;
  // The name of the format, which ends with a NUL.
  char format[16];
  // Bytes of the disk, or -1 if that is not known.
  int64_t virtual_size;
  // Bytes of the disk for which the image has data, or -1 if that is not known.
  int64_t data_bytes;
  // Bytes of the file.
  uint64_t file_length;
} vdkit_verdict;

// Called for each range of the disk, by the thread that walks; a result other than 0 ends the walk. It may
// use the disk, but not close it.
typedef int (*vdkit_range_fn)(void *user, uint64_t offset, uint64_t length);

// Decides whether an image may open another file that it names: returns nonzero to allow it. `file`
// is the image, `target` the name as it stands there. Called from the thread that opens the image.
typedef int (*vdkit_reference_fn)(void *user, const char *file, const char *target);

// A finished request.
typedef struct {
  // The number that was submitted with it.
  uint64_t cookie;
  // 0, or a VDKIT_E_ code.
  int result;
  // 0; for later versions.
  int reserved;
} vdkit_completion;

// How an image's bytes are read and written. Functions return 0 for success (`size` and `pread` a
// count), and the negative number of an error (-EIO, -ENOSPC, ...) otherwise; anything else is EIO. They
// are called from any thread, and from several at once, and must not use the disk that stands on them.
typedef struct {
  // sizeof(vdkit_storage_ops), so that later versions can add functions.
  size_t struct_size;
  // The length in bytes.
  int64_t (*size)(void *user);
  // Reads up to `len` bytes at `offset` and returns how many; fewer only at the end.
  int64_t (*pread)(void *user, void *buf, size_t len, uint64_t offset);
  // Writes all of `buf`, making the storage longer if needed. NULL if it cannot be written.
  int (*pwrite)(void *user, const void *buf, size_t len, uint64_t offset);
  // Makes bytes read as zero, also beyond the end, which moves. NULL writes zeroes instead.
  int (*zero)(void *user, uint64_t len, uint64_t offset);
  // Frees space; the bytes then read as zero or as before. NULL does nothing.
  int (*discard)(void *user, uint64_t len, uint64_t offset);
  // Makes all writes that have returned durable. NULL if they always are.
  int (*sync)(void *user);
  // Sets the length; new bytes read as zero. NULL if the length is fixed.
  int (*set_size)(void *user, uint64_t size);
  // Called once when the storage is not used any more. NULL does nothing.
  void (*free)(void *user);
} vdkit_storage_ops;

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

// Makes options. Freed by vdkit_create_options_free().
int vdkit_create_options_new(vdkit_create_options **options);

// Frees options. They may be freed as soon as the functions that took them have returned. NULL is
// allowed.
void vdkit_create_options_free(vdkit_create_options *options);

// Adds options of the format: "key=value,..." (as `vdkit create -o`). Of several values of a key the
// last one counts. An option that the format does not have is an error of the function that makes the
// image.
int vdkit_create_options_add(vdkit_create_options *options,
                             const char *text);

// Sets the passphrase or key of a new image that is encrypted, such as a qcow2 image with
// "encrypt.format=luks": `len` bytes, which are copied, and wiped when the options and all that uses
// them are freed. For any other image a key is an error.
int vdkit_create_options_key(vdkit_create_options *options,
                             const void *key,
                             size_t len);

// Sets the image that the new one stands on, as a name from the new one's folder; NULL for none. `format`
// may be NULL: it is found then, and must not be raw. `opening` says how the backing image is opened: its
// keys, references and locks; it is copied, and may be NULL.
int vdkit_create_options_backing(vdkit_create_options *options,
                                 const char *backing,
                                 const char *format,
                                 const vdkit_open_options *opening);

// Makes a new image. `size`: bytes of its disk; 0 takes those of the backing image. `options` may be
// NULL. `flags`: VDKIT_CREATE_REPLACE, or 0. `monitor` hears of images that are written whole (the option
// "preallocation=full"), and may be NULL. Nothing is left behind after an error.
int vdkit_create(const char *path,
                 const char *format,
                 uint64_t size,
                 const vdkit_create_options *options,
                 uint32_t flags,
                 const vdkit_monitor *monitor);

// Opens an image and what it stands on. `options` may be NULL. NBD URIs are paths too. Closed by
// vdkit_close().
int vdkit_open(const char *path,
               const vdkit_open_options *options,
               vdkit_disk **disk);

// Opens an image by a file descriptor. A file or block device is opened again where the system allows it, and
// the descriptor duplicated elsewhere (two disks by one descriptor then share their locks); the caller
// closes its own. `name` is for messages. References within the image reach only folders that the options allow.
int vdkit_open_fd(int fd,
                  const char *name,
                  const vdkit_open_options *options,
                  vdkit_disk **disk);

// Flushes and closes a disk; it is freed also after an error. No other call may use it any more. If one
// of its queues is not freed, the result is VDKIT_E_USAGE, and the disk stays open. NULL is allowed.
int vdkit_close(vdkit_disk *disk);

// The size of the disk in bytes; 0 for NULL.
uint64_t vdkit_size(const vdkit_disk *disk);

// 1 if the disk can be written, 0 if not, and for NULL.
int vdkit_is_writable(const vdkit_disk *disk);

// Reads exactly `len` bytes at `offset`; a range beyond the end is an error.
int vdkit_pread(const vdkit_disk *disk, void *buf, size_t len, uint64_t offset);

// Writes exactly `len` bytes at `offset`; a range beyond the end is an error. Durable after the next
// vdkit_flush(), or at once in the cache modes that say so.
int vdkit_pwrite(const vdkit_disk *disk,
                 const void *buf,
                 size_t len,
                 uint64_t offset);

// Reads into several pieces of memory in turn, which are one range of the disk; if it ends beyond the disk,
// nothing is read. After an error what the pieces hold is undefined.
int vdkit_preadv(const vdkit_disk *disk,
                 const vdkit_iovec *pieces,
                 int count,
                 uint64_t offset);

// Writes several pieces of memory in turn, which are one range of the disk; if it ends beyond the disk,
// nothing is written. After another error each byte of the range is old or new. In the cache modes in
// which a write is durable at once, one flush at the end serves all pieces.
int vdkit_pwritev(const vdkit_disk *disk,
                  const vdkit_iovec *pieces,
                  int count,
                  uint64_t offset);

// Makes `len` bytes at `offset` read as zero, without writing them where the format can say so.
// `flags`: VDKIT_MAY_UNMAP, or 0.
int vdkit_write_zeroes(const vdkit_disk *disk, uint64_t len, uint64_t offset, uint32_t flags);

// Frees space, as a hint: the bytes then read as zero or as before.
int vdkit_discard(const vdkit_disk *disk, uint64_t len, uint64_t offset);

// Makes every write that has returned durable.
int vdkit_flush(const vdkit_disk *disk);

// Changes the size; durable on return. Other threads and queues may use the disk meanwhile: some formats
// let their requests wait. Those beyond a smaller size fail. `flags`: VDKIT_SHRINK, or 0. `monitor` hears of
// zeroes that are written (to encrypted disks), and may be NULL; a disk that was to grow and is ended so has its
// old size.
int vdkit_resize(const vdkit_disk *disk,
                 uint64_t size,
                 uint32_t flags,
                 const vdkit_monitor *monitor);

// Calls `each` for all extents of a range, in order. If `each` ends the walk, the result is
// VDKIT_E_INTERRUPTED.
int vdkit_extents(const vdkit_disk *disk,
                  uint64_t len,
                  uint64_t offset,
                  vdkit_extent_fn each,
                  void *user);

// What `vdkit info --chain --json` says: an array with an image and those beneath it, their snapshots and
// bitmaps, as a string for vdkit_free(). No data is read. `options` may be NULL.
int vdkit_info(const char *path,
               const vdkit_open_options *options,
               char **json);

// The result of this thread's last call: 0, or a code.
int vdkit_error_code(void);

// The message of this thread's last call, in one line (control characters, such as a line break in a file's
// name, are escaped); empty if that did not fail. Valid until the thread's next call; do not free it.
const char *vdkit_error_message(void);

// The file that the error of this thread's last call is about, or NULL. Valid until the thread's
// next call; do not free it.
const char *vdkit_error_file(void);

// The byte offset in that file, or -1.
int64_t vdkit_error_offset(void);

// What can be done about the error of this thread's last call, or NULL. It may have several lines, such as a
// list of the options that there are. Valid until the thread's next call; do not free it.
const char *vdkit_error_hint(void);

// The number of the system's error behind the error of this thread's last call, such as ENOENT or EIO;
// 0 if there is none.
int vdkit_error_errno(void);

// The VDKIT_API_VERSION of the library that is loaded.
int vdkit_api_version(void);

// The version of the library, such as "0.1.0". Do not free it.
const char *vdkit_version(void);

// Frees a string that a function handed out. NULL is allowed.
void vdkit_free(char *text);

// The formats' names with a comma between them, as a string for vdkit_free().
char *vdkit_formats(void);

// Judges an image from a stranger without opening what it names: reads little, within limits of time
// and memory. `format`: what it must be, or NULL. `verdict` is filled, but for its `struct_size`; a bad image
// is a result and no error. `monitor` hears of the bytes that are read. `monitor` and `report` may be NULL.
int vdkit_inspect(const char *path,
                  const char *format,
                  uint32_t flags,
                  const vdkit_monitor *monitor,
                  vdkit_verdict *verdict,
                  char **report);

// Copies a disk into a new image of another format. The new image gets its name when it is complete;
// nothing is left behind after an error, but with VDKIT_CONVERT_INTO what was written so far. `opening` is
// for the source. `target_format` may be NULL with VDKIT_CONVERT_INTO (it is found) and is required
// otherwise. `options` may be NULL: what the new image shall be; with a backing image, which must be one of
// the source's chain, only the differences to it are written. With VDKIT_CONVERT_INTO they may only have
// the target's key. `report` may be NULL; its string is for vdkit_free().
int vdkit_convert(const char *source,
                  const vdkit_open_options *opening,
                  const char *target,
                  const char *target_format,
                  const vdkit_create_options *options,
                  uint32_t flags,
                  const vdkit_monitor *monitor,
                  char **report);

// As vdkit_convert(), from a disk that is open, whose bytes may be the program's own. It is taken
// over, and closed also after an error: do not use or close it any more. (Only if a queue of it is not
// freed does it stay the caller's.)
int vdkit_convert_disk(vdkit_disk *source,
                       const char *target,
                       const char *target_format,
                       const vdkit_create_options *options,
                       uint32_t flags,
                       const vdkit_monitor *monitor,
                       char **report);

// Checks an image's metadata, and repairs it. `errors` gets the number of damages and of leaks that
// are left. A damaged image is a result and no error. `errors` and `report` may be NULL.
int vdkit_check(const char *path,
                const vdkit_open_options *opening,
                uint32_t repair,
                const vdkit_monitor *monitor,
                uint64_t *errors,
                char **report);

// Compares what two disks hold. `equal` gets 1 or 0; `report` may be NULL.
int vdkit_compare(const vdkit_disk *a,
                  const vdkit_disk *b,
                  uint32_t flags,
                  const vdkit_monitor *monitor,
                  int *equal,
                  char **report);

// Tells how many bytes an image of a format would have with the data of this one: `required` now,
// `full` with every byte of the disk allocated. Both, `options` and `monitor` may be NULL.
int vdkit_measure(const char *path,
                  const vdkit_open_options *opening,
                  const char *format,
                  const char *options,
                  const vdkit_monitor *monitor,
                  uint64_t *required,
                  uint64_t *full);

// Writes an overlay's data into the image that it stands on, or into `to`, a deeper one of its chain
// (NULL: the first). `flags`: VDKIT_FORCE, or 0. `report` may be NULL.
int vdkit_commit(const char *overlay,
                 const vdkit_open_options *opening,
                 const char *to,
                 uint32_t flags,
                 const vdkit_monitor *monitor,
                 char **report);

// Puts an overlay on another image, and keeps what its disk holds. `backing`: as a name from the
// overlay's folder; NULL makes it stand alone. `flags`: VDKIT_FORCE, VDKIT_HEADER_ONLY. `report` may
// be NULL.
int vdkit_rebase(const char *overlay,
                 const vdkit_open_options *opening,
                 const char *backing,
                 const char *backing_format,
                 uint32_t flags,
                 const vdkit_monitor *monitor,
                 char **report);

// Takes, applies or deletes an internal snapshot of a disk that is open for writing; durable on
// return. `name` is a name, or an id for the latter two. `monitor` may be NULL; a snapshot that it ends changes
// nothing.
int vdkit_snapshot(const vdkit_disk *disk,
                   uint32_t action,
                   const char *name,
                   const vdkit_monitor *monitor);

// The internal snapshots of a disk as JSON, a string for vdkit_free().
int vdkit_snapshots(const vdkit_disk *disk, char **json);

// Changes a dirty bitmap of a disk that is open for writing; durable on return. `granularity`: bytes
// of the disk for each bit of a new one, a power of two; 0 takes the format's own. `monitor` is called
// before the change, which it may end, and after it; it may be NULL.
int vdkit_bitmap(const vdkit_disk *disk,
                 uint32_t action,
                 const char *name,
                 uint64_t granularity,
                 const vdkit_monitor *monitor);

// Calls `each` for all ranges that a dirty bitmap marks when the call begins, in order. If `each` ends the
// walk, the result is VDKIT_E_INTERRUPTED.
int vdkit_bitmap_ranges(const vdkit_disk *disk,
                        const char *name,
                        vdkit_range_fn each,
                        void *user);

// Makes an image smaller on the host, in place. `report` may be NULL.
int vdkit_compact(const char *path,
                  const vdkit_open_options *opening,
                  const vdkit_monitor *monitor,
                  char **report);

// Changes options of an existing image: `options` is "key=value,..." (as `vdkit amend -o`). After a crash it
// can be repeated. `report` may be NULL.
int vdkit_amend(const char *path,
                const vdkit_open_options *opening,
                const char *options,
                const vdkit_monitor *monitor,
                char **report);

// Lists the key slots of an encrypted image, and those that the keys of `opening` open, as JSON for
// vdkit_free(). `monitor` hears of slots that were tried, here and in the functions below; it may be NULL.
int vdkit_keys(const char *path,
               const vdkit_open_options *opening,
               const vdkit_monitor *monitor,
               char **json);

// Adds a key of `len` bytes to an encrypted image that a key of `opening` opens; durable on return.
// `milliseconds`: how long trying the new key shall take on this machine; 0 takes 2000. `flags`:
// VDKIT_KEY_REPLACE, or 0. If `monitor` ends it, the keys are as before. `report` may be NULL.
int vdkit_key_add(const char *path,
                  const vdkit_open_options *opening,
                  const void *key,
                  size_t len,
                  uint32_t milliseconds,
                  uint32_t flags,
                  const vdkit_monitor *monitor,
                  char **report);

// Wipes a key slot. Without VDKIT_FORCE in `flags`, a key of `opening` must open another slot. If `monitor`
// ends it, nothing is wiped. `report` may be NULL.
int vdkit_key_remove(const char *path,
                     const vdkit_open_options *opening,
                     uint32_t slot,
                     uint32_t flags,
                     const vdkit_monitor *monitor,
                     char **report);

// Makes options. Freed by vdkit_open_options_free().
int vdkit_open_options_new(vdkit_open_options **options);

// Frees options. They may be freed as soon as the functions that took them have returned. NULL is
// allowed.
void vdkit_open_options_free(vdkit_open_options *options);

// Opens the image for writing if `writable` is not 0. The format must then be named if the image is
// raw.
int vdkit_open_options_writable(vdkit_open_options *options,
                                int writable);

// Names the format: one of vdkit_formats(); NULL finds it in the file.
int vdkit_open_options_format(vdkit_open_options *options, const char *format);

// Sets the cache mode: "writeback" (the default), "none", "writethrough", "directsync" or "unsafe",
// as in QEMU.
int vdkit_open_options_cache(vdkit_open_options *options,
                             const char *cache);

// Opens without QEMU's locks if `lock` is 0: for an image that another process writes, whose content
// may then be inconsistent.
int vdkit_open_options_lock(vdkit_open_options *options,
                            int lock);

// Opens an internal snapshot, by name or id; NULL opens the current disk.
int vdkit_open_options_snapshot(vdkit_open_options *options, const char *snapshot);

// Opens this file as the backing image; an empty name opens the image alone, and NULL the file that
// the image names. `format` may be NULL.
int vdkit_open_options_backing(vdkit_open_options *options,
                               const char *backing,
                               const char *format);

// Adds a passphrase or key for encrypted images: `len` bytes, which are copied, and wiped when the
// options and all disks that use them are freed.
int vdkit_open_options_add_key(vdkit_open_options *options,
                               const void *key,
                               size_t len);

// Sets which files an image may name: "own-folder" (the default: beneath the image's folder),
// "nothing", or "folder:PATH" (the own folder and this one; several calls add folders).
int vdkit_open_options_references(vdkit_open_options *options, const char *policy);

// Asks a function of the program about each reference.
int vdkit_open_options_ask(vdkit_open_options *options, vdkit_reference_fn decide, void *user);

// Makes a queue for a disk, with so many threads; 0 takes one per processor. Freed by
// vdkit_queue_free().
int vdkit_queue_new(const vdkit_disk *disk, int threads, vdkit_queue **queue);

// Waits until all submitted requests are done, and frees a queue with its descriptor and the completions
// that were not reaped. No other call may use it any more. NULL is allowed.
void vdkit_queue_free(vdkit_queue *queue);

// A descriptor that is readable while completions wait to be reaped, for poll() and its kin. It
// belongs to the queue: neither read nor close it. -1 for NULL.
int vdkit_queue_fd(const vdkit_queue *queue);

// Submits a read. The buffer is the queue's until the completion with this cookie is reaped.
// Requests are done in any order.
int vdkit_queue_pread(const vdkit_queue *queue,
                      void *buf,
                      size_t len,
                      uint64_t offset,
                      uint64_t cookie);

// Submits a write; see vdkit_queue_pread(). The buffer must not be changed meanwhile.
int vdkit_queue_pwrite(const vdkit_queue *queue,
                       const void *buf,
                       size_t len,
                       uint64_t offset,
                       uint64_t cookie);

// Submits vdkit_write_zeroes().
int vdkit_queue_write_zeroes(const vdkit_queue *queue,
                             uint64_t len,
                             uint64_t offset,
                             uint32_t flags,
                             uint64_t cookie);

// Submits vdkit_discard().
int vdkit_queue_discard(const vdkit_queue *queue,
                        uint64_t len,
                        uint64_t offset,
                        uint64_t cookie);

// Submits vdkit_flush(): makes durable what was completed before this call.
int vdkit_queue_flush(const vdkit_queue *queue, uint64_t cookie);

// Reaps up to `max` completions into `completions` and returns how many: waits until there is one, at
// most `timeout_ms` milliseconds (0: does not wait; negative: for any time). Returns 0 at once if no
// request is open. A completion has only the code of an error.
int vdkit_queue_reap(const vdkit_queue *queue,
                     vdkit_completion *completions,
                     int max,
                     int timeout_ms);

// The number of requests that are submitted and not reaped; 0 for NULL.
size_t vdkit_queue_open(const vdkit_queue *queue);

// Serves a disk to NBD clients, on threads of its own, at "unix:PATH" or "tcp:HOST:PORT" (port 0: any
// free one). `name` is the export's; NULL is the empty one. The server takes the disk over, and closes it
// also if it cannot be started: do not use or close it any more. (Only if a queue of it is not freed does
// it stay the caller's.) Ended by vdkit_server_stop().
int vdkit_serve_nbd(vdkit_disk *disk,
                    const char *address,
                    const char *name,
                    uint32_t flags,
                    vdkit_server **server);

// As vdkit_serve_nbd(), for clients with TLS alone. `credentials`: a folder with server-cert.pem and
// server-key.pem, as libvirt and QEMU name them; with ca-cert.pem too, clients must present a certificate of
// that authority.
int vdkit_serve_nbd_tls(vdkit_disk *disk,
                        const char *address,
                        const char *name,
                        const char *credentials,
                        uint32_t flags,
                        vdkit_server **server);

// Serves a disk as a virtio disk of one virtual machine: its monitor (QEMU, Cloud Hypervisor, crosvm, ...)
// connects by vhost-user-blk to the Unix socket `path`. Otherwise as vdkit_serve_nbd().
int vdkit_serve_vhost_user(vdkit_disk *disk,
                           const char *path,
                           uint32_t flags,
                           vdkit_server **server);

// The URI of the export, for clients ("vhost-user:PATH" for a monitor); it lives as long as the server.
// NULL for NULL.
const char *vdkit_server_uri(const vdkit_server *server);

// The number of clients that are connected; 0 for NULL.
int vdkit_server_clients(const vdkit_server *server);

// Ends a server: no new requests are taken, those that have begun are answered, then the disk is flushed and
// closed. NBD clients are cut off after `drain_ms` milliseconds; a virtual machine's requests are waited for.
// Requests that wait for space fail, or stay with the virtual machine for its next server. Everything is freed
// also after an error. NULL is allowed. In a child of fork() it fails, and the parent's server goes on.
int vdkit_server_stop(vdkit_server *server,
                      uint32_t drain_ms);

// Opens an image whose bytes the program reads and writes. `ops` is copied; `user` is passed to its
// functions, and must live until `free` is called, which happens also if this function fails (but not
// where `ops`, `name` or `disk` is wrong). `name` is for messages. References within the image reach only folders that the options allow.
int vdkit_open_storage(const vdkit_storage_ops *ops,
                       void *user,
                       const char *name,
                       const vdkit_open_options *options,
                       vdkit_disk **disk);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* VDKIT_H */
