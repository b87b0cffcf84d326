//! A process in which no thread can be started.

use std::process::Command;

/// The variable that holds the argument of such a process.
const ARGUMENT: &str = "VDKIT_THREADLESS";
/// The size of each thread's stack there: more than an address space has. A limit of the system
/// would not do: root is exempt from most.
const STACK_BYTES: u64 = 1 << 48;

/// The argument of [`run_threadless`], in the process that it started; `None` elsewhere.
///
/// # Panics
/// If a thread can be started there.
pub fn threadless_argument() -> Option<String> {
    let argument = std::env::var(ARGUMENT).ok()?;
    let started = std::thread::Builder::new().spawn(|| ());
    assert!(started.is_err(), "a thread was started");
    Some(argument)
}

/// Runs one test of this program, by its full name, in a process in which starting a thread fails.
///
/// # Panics
/// If the test fails, or there is none of this name.
pub fn run_threadless(test: &str, argument: &str) {
    let own = std::env::current_exe().expect("the test's own program");
    let output = Command::new(own)
        .args([test, "--exact", "--test-threads=1"])
        .env(ARGUMENT, argument)
        .env("RUST_MIN_STACK", STACK_BYTES.to_string())
        .output()
        .expect("it is started");
    let (out, err) =
        (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success() && out.contains("1 passed"), "{out}{err}");
}
