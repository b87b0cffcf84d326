//! Formats times. Dates are in UTC, so that an answer is the same everywhere.

pub use vdkit_qemu::dates::utc;

/// Formats a machine's uptime as `0:00:07.125`, hours first.
pub fn clock(nanoseconds: u64) -> String {
    let (seconds, rest) = (nanoseconds / 1_000_000_000, nanoseconds % 1_000_000_000);
    let (hours, minutes) = (seconds / 3600, seconds / 60 % 60);
    format!("{hours}:{minutes:02}:{:02}.{:03}", seconds % 60, rest / 1_000_000)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates() {
        for (seconds, text) in [
            (0, "1970-01-01 00:00:00"),
            (951_782_399, "2000-02-28 23:59:59"),
            (951_782_400, "2000-02-29 00:00:00"),
            (1_795_233_978, "2026-11-21 04:06:18"),
            (u32::MAX, "2106-02-07 06:28:15"),
        ] {
            assert_eq!(utc(seconds), text);
        }
    }

    #[test]
    fn clocks() {
        assert_eq!(clock(0), "0:00:00.000");
        assert_eq!(clock(7_125_900_000), "0:00:07.125");
        assert_eq!(clock(u64::MAX), "5124095:34:33.709");
    }
}
