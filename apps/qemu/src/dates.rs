//! Dates as text, in UTC and in the time zone of the machine.

use jiff::Timestamp;
use jiff::tz::TimeZone;

/// Seconds since 1970 as `2026-11-21 04:06:18`, in local time.
pub fn local(seconds: u32) -> String {
    text(seconds, TimeZone::system())
}

/// Seconds since 1970 as `2026-11-21 04:06:18`, in UTC.
pub fn utc(seconds: u32) -> String {
    text(seconds, TimeZone::UTC)
}

/// A guest's clock as `0:00:07.125`: hours of at least `digits` digits, minutes, seconds, milliseconds.
pub fn clock(nanoseconds: u64, digits: usize) -> String {
    let (seconds, rest) = (nanoseconds / 1_000_000_000, nanoseconds % 1_000_000_000);
    let (hours, minutes) = (seconds / 3600, seconds / 60 % 60);
    format!("{hours:0digits$}:{minutes:02}:{:02}.{:03}", seconds % 60, rest / 1_000_000)
}

fn text(seconds: u32, zone: TimeZone) -> String {
    // Within the years of a timestamp.
    let time = Timestamp::from_second(seconds.into()).unwrap_or_default();
    time.to_zoned_datetime(zone).strftime("%Y-%m-%d %H:%M:%S").to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seconds_become_dates() {
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
    fn clocks_begin_with_the_hours() {
        assert_eq!(clock(0, 1), "0:00:00.000");
        assert_eq!(clock(7_125_900_000, 4), "0000:00:07.125");
        assert_eq!(clock(u64::MAX, 1), "5124095:34:33.709");
    }
}
