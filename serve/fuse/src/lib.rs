//! FUSE: serves an export as one plain file.
//!
//! The disk is mounted over a regular file. The file then has the disk's size, and programs read,
//! write, map and punch it, so whatever works on a raw image works on any image.
//! `docs/exports/fuse.md` lists the file's guarantees.
//!
//! ```text
//!  kernel ─► /dev/fuse ─► a few threads that read requests (fuser)
//!               │  disk_file   request handlers
//!               │  dispatcher       run inline, or on vdkit_serve::Pool
//!               │  attributes  file attributes
//!               │  holes       SEEK_HOLE and SEEK_DATA
//!  mount_point  the mounted-over file, and stale mounts
//!  server       mounting, serving, unmounting
//! ```

mod attributes;
mod buffer;
mod disk_file;
mod dispatcher;
mod errno;
mod holes;
mod mount_point;
mod server;

pub use mount_point::MountError;
pub use server::{Ending, Server, ServerOptions};
