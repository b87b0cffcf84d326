//! A test's processor time.

use std::time::Duration;

/// The processor's time that the calling thread has taken so far, to a tick of the kernel. Unlike
/// time by the clock it does not go on while others have the processor, so that a test may bound it.
///
/// # Panics
/// If there is no `/proc`. Source: proc_pid_stat(5), fields 14 and 15.
pub fn processor_time() -> Duration {
    let text = std::fs::read_to_string("/proc/thread-self/stat").expect("/proc");
    // The name, field 2, may hold anything.
    let (_, rest) = text.rsplit_once(')').expect("a name in parentheses");
    let ticks = rest.split_whitespace().skip(11).take(2).map(|field| {
        let ticks: u64 = field.parse().expect("ticks of the clock");
        ticks
    });
    let a_second = rustix::param::clock_ticks_per_second();
    Duration::from_millis(ticks.sum::<u64>() * 1000 / a_second)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn work_counts_and_sleep_does_not() {
        let before = processor_time();
        std::thread::sleep(Duration::from_millis(300));
        let slept = processor_time() - before;
        assert!(slept < Duration::from_millis(300), "{slept:?}");
        let mut sum = 0_u64;
        while processor_time() - before < slept + Duration::from_millis(30) {
            sum = std::hint::black_box(sum + 1);
        }
        assert!(sum > 0);
    }
}
