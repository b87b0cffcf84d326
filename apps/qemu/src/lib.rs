//! vdkit under the names `qemu-img` and `qemu-nbd`, so that programs that call these run unchanged.
//!
//! This crate parses options and words answers; all work is done by the engine's jobs. What it takes
//! and says was learnt from QEMU 10.0's documentation and by running its programs side by side with
//! this one (`dev/differential`; docs/qemu-compat.md lists the differences that are left).
//!
//! | module | content |
//! |---|---|
//! | `getopt` | options as GNU `getopt_long` reads them |
//! | `names` | image names: paths, `json:`, `--image-opts`, protocols |
//! | `open` | from a name to a disk, with QEMU's defaults |
//! | `storages`, `debug` | what only QEMU's names ask for: parts, storages that fail or compare |
//! | `json`, `human` | answers for programs and for people |
//! | `img` | a file for each subcommand of `qemu-img` |
//! | `nbd` | `qemu-nbd` |

// These macros panic when the reader went away.
#![deny(clippy::print_stdout, clippy::print_stderr)]

mod creation;
pub mod dates;
mod debug;
mod failure;
mod getopt;
mod human;
mod img;
mod json;
mod names;
mod nbd;
mod nodes;
mod open;
mod output;
mod secrets;
pub mod signals;
mod sizes;
mod snapshots;
pub mod sockets;
mod specific;
mod storages;

use std::ffi::{OsStr, OsString};
use std::path::Path;
use std::process::ExitCode;

/// The version of QEMU whose options and answers these are.
const QEMU_VERSION: &str = "10.0.2";

/// A program whose name vdkit answers to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Program {
    /// `qemu-img`.
    Img,
    /// `qemu-nbd`.
    Nbd,
}

impl Program {
    /// The program with this name, which may be a path.
    pub fn named(name: &OsStr) -> Option<Self> {
        match Path::new(name).file_name()?.to_str()? {
            "qemu-img" => Some(Self::Img),
            "qemu-nbd" => Some(Self::Nbd),
            _ => None,
        }
    }

    /// Runs the program by this name, with the arguments that follow it.
    pub fn run(self, name: &OsStr, args: &[OsString]) -> ExitCode {
        match self {
            Self::Img => img::main(&name.to_string_lossy(), args),
            Self::Nbd => nbd::main(args),
        }
    }
}
