//! The command `vdkit`. All code is in the library, so that tests can read the command's
//! definition.

use std::process::ExitCode;

/// A static program looks names up in files and DNS alone. Other ways (mDNS, systemd's resolver) are shared
/// libraries, which need the very C library that the program was linked with, and crash with another one.
#[cfg(all(target_env = "gnu", target_feature = "crt-static"))]
fn look_names_up_without_modules() {
    use std::ffi::{CStr, c_char, c_int};
    unsafe extern "C" {
        fn __nss_configure_lookup(database: *const c_char, ways: *const c_char) -> c_int;
    }
    const WAYS: [(&CStr, &CStr); 3] =
        [(c"hosts", c"files dns"), (c"passwd", c"files"), (c"group", c"files")];
    for (database, ways) in WAYS {
        // SAFETY: both are strings that end with zero and live forever; no thread runs yet that could look a name up.
        unsafe { __nss_configure_lookup(database.as_ptr(), ways.as_ptr()) };
    }
}

fn main() -> ExitCode {
    #[cfg(all(target_env = "gnu", target_feature = "crt-static"))]
    look_names_up_without_modules();
    vdkit_cli::main()
}
