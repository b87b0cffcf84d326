//! FUSE: serves an export as one plain file.
//!
//! The disk is mounted over a regular file. The file then has the disk's size, and programs read,
//! write, map and punch it, so whatever works on a raw image works on any image.
//! `docs/exports/fuse.md` lists the file's guarantees.
//!
//! ```text
//!  kernel ─► /dev/fuse ─► a few threads that read requests (fuser)
//!               │  disk_file   what each request means
//!               │  lanes       done where it stands, or handed to
//!               │  pool        threads that may block
//!               │  attributes  what stat says
//!               │  holes       SEEK_HOLE and SEEK_DATA
//!  mount_point  the file beneath, and mounts of servers that are gone
//!  server       mounting, serving, and the end of it
//! ```

mod attributes;
mod buffer;
mod disk_file;
mod errno;
mod holes;
mod lanes;
mod mount_point;
mod pool;
mod server;

pub use mount_point::MountError;
pub use server::{Ending, Server, ServerOptions};
