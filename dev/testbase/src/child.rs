//! A child of `fork`, which shares its parent's open files and has a copy of its memory.

use std::io::{Read, Write};
use std::panic::{AssertUnwindSafe, catch_unwind};

/// The child is killed after so many seconds: the test then fails and does not hang.
const SECONDS_MAX: u32 = 60;

/// Forks, runs `meanwhile` in the parent, and then `act` in the child. Returns whether `act` returned true.
///
/// # Panics
/// If there is no child to be had.
pub fn in_child(meanwhile: impl FnOnce(), act: impl FnOnce() -> bool) -> bool {
    let (mut reader, mut writer) = std::io::pipe().expect("a pipe");
    // SAFETY: the child has one thread. It takes no lock that another thread of the parent may hold, but
    // for the allocator's, which the C library resets. It ends without any destructor of the parent.
    match unsafe { libc::fork() } {
        0 => {
            drop(writer);
            // SAFETY: it sets a timer of the child alone.
            unsafe { libc::alarm(SECONDS_MAX) };
            // The end of the pipe instead of a byte: `meanwhile` has failed.
            let begins = reader.read_exact(&mut [0]).is_ok();
            // A panic must not reach the test's harness, which the child has too.
            let succeeded = begins && catch_unwind(AssertUnwindSafe(act)).unwrap_or(false);
            // SAFETY: see above.
            unsafe { libc::_exit(i32::from(!succeeded)) }
        }
        child => {
            assert!(child > 0, "fork: {}", std::io::Error::last_os_error());
            meanwhile();
            writer.write_all(&[0]).expect("the child reads");
            let mut status = -1;
            // SAFETY: `waitpid` writes one `int`, which lives across the call.
            unsafe { libc::waitpid(child, &mut status, 0) };
            status == 0
        }
    }
}
