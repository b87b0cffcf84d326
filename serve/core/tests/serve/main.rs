//! Guarantees of an export to every server: of its requests, of its end and its pauses, and of its
//! control socket.

mod closing;
mod control;
mod export;

use std::time::Duration;

use vdkit_block::Error;

/// Time limit of all waits.
const PATIENCE: Duration = Duration::from_secs(120);
/// Maximum bytes kept for lack of space.
const KEPT_BYTES_MAX: usize = 256 << 20;

fn no_space() -> Error {
    Error::NoSpace { file: "image".to_owned(), what: "for a test".to_owned() }
}
