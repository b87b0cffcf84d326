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
//! | `json`, `human` | answers for programs and for people |
//! | `img` | a file for each subcommand of `qemu-img` |

mod failure;
mod getopt;
mod human;
mod img;
mod json;
mod names;
mod open;
mod output;
mod secrets;
mod sizes;
mod specific;

use std::ffi::{OsStr, OsString};
use std::path::Path;
use std::process::ExitCode;

/// A program whose name vdkit answers to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Program {
    /// `qemu-img`.
    Img,
}

impl Program {
    /// The program with this name, which may be a path.
    pub fn named(name: &OsStr) -> Option<Self> {
        match Path::new(name).file_name()?.to_str()? {
            "qemu-img" => Some(Self::Img),
            _ => None,
        }
    }

    /// Runs the program with the arguments that follow its name.
    pub fn run(self, args: &[OsString]) -> ExitCode {
        match self {
            Self::Img => img::main(args),
        }
    }
}
