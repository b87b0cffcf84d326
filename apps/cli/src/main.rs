//! The command `vdkit`. All code is in the library, so that tests can read the command's
//! definition.

use std::process::ExitCode;

fn main() -> ExitCode {
    vdkit_cli::main()
}
