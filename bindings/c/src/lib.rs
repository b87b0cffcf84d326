//! libvdkit: the facade as a C library. The header `include/vdkit.h` is made from these sources
//! (`make c-header`), so the comments here are written for C programmers.
//!
//! ```text
//!   border   raw pointers to Rust values, and results to codes: what the functions share
//!   error    the last error of each thread
//!   options  how images are opened
//!   creation new images
//!   storage  images whose bytes the program itself reads and writes
//!   disk     an open disk: reads, writes, extents
//!   queue    requests in the background, with an event descriptor
//!   jobs     convert, check, compare and the other long work
//!   inspect  whether an image from a stranger is safe
//!   keys     options and key slots of existing images
//!   server   a disk for NBD clients, or for a virtual machine
//! ```
//!
//! Each function is `unsafe` for one reason: its pointers must be as the header says.

#![allow(non_camel_case_types)] // The names are those of C.
#![allow(clippy::missing_safety_doc)] // Said once, above and at the head of the header.

mod border;
pub mod creation;
pub mod disk;
pub mod error;
pub mod inspect;
pub mod jobs;
pub mod keys;
pub mod options;
pub mod queue;
pub mod server;
pub mod storage;
