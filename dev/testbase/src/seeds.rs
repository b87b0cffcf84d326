//! Random tests that run many cases and can be repeated.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use crate::Rng;

/// Number of cases of a test: the environment variable `VDKIT_CASES` times the default.
pub fn cases(default: u64) -> u64 {
    number("VDKIT_CASES").map_or(default, |times| default.saturating_mul(times))
}

/// The seed of this run: `VDKIT_SEED`, or a random one.
pub fn seed() -> u64 {
    number("VDKIT_SEED").unwrap_or_else(|| {
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
        now.map_or(1, |t| t.as_nanos() as u64) ^ u64::from(std::process::id()) << 40
    })
}

/// The number in an environment variable, decimal or with `0x` hexadecimal.
pub(crate) fn number(name: &str) -> Option<u64> {
    let text = std::env::var(name).ok()?;
    let number = match text.strip_prefix("0x") {
        Some(hex) => u64::from_str_radix(hex, 16),
        None => text.parse(),
    };
    Some(number.unwrap_or_else(|_| panic!("{name} must be a number, it is '{text}'")))
}

/// Runs `case` for seeds derived from [`seed`]; a failure reports how to replay that case.
///
/// # Panics
/// As `case` does.
pub fn for_seeds(default_cases: u64, case: impl Fn(u64)) {
    let replay = number("VDKIT_SEED");
    let first = seed();
    for i in 0..if replay.is_some() { 1 } else { cases(default_cases) } {
        let seed = replay.unwrap_or_else(|| Rng::new(first.wrapping_add(i)).next_u64() >> 16);
        let about = || {
            let name = std::thread::current().name().unwrap_or("?").to_owned();
            format!("failed with a seed; replay: VDKIT_SEED={seed} cargo test {name}")
        };
        explained(about, || case(seed));
    }
}

/// Runs `test`; if it panics, prints `about` too: what its own message does not say.
///
/// # Panics
/// As `test` does.
pub fn explained<T>(about: impl FnOnce() -> String, test: impl FnOnce() -> T) -> T {
    catch_unwind(AssertUnwindSafe(test)).unwrap_or_else(|panic| {
        eprintln!("{}", about());
        resume_unwind(panic)
    })
}
