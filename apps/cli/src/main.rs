//! The command `vdkit`; everything is in the library so that tests can read the definition.

use std::process::ExitCode;

fn main() -> ExitCode {
    vdkit_cli::main()
}
